"""Memory lives as long as a copy may touch it, and no longer."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from copy_layouts import torch_or_skip
from kvtier import CopyEngine, HostMemory, MemoryLayout

MIB = 1 << 20


def test_a_tensor_that_is_given_other_storage_keeps_the_first_alive() -> None:
    torch = torch_or_skip()
    tensor = torch.full((4, 8 * MIB), 3, dtype=torch.uint8)
    layout = MemoryLayout.from_tensors([tensor])
    host = HostMemory(4, 8 * MIB)
    tensor.data = torch.zeros(1, dtype=torch.uint8)  # frees a large block, if nobody else has it
    with CopyEngine(layout, host) as engine:
        engine.submit_pairs(1, "store", [(block, block) for block in range(4)])
    assert (host.array() == 3).all()


def test_buffers_outlive_their_names_and_not_their_engine() -> None:
    class Tracked(np.ndarray):
        pass

    gpu = np.full((64, MIB), 5, np.uint8).view(Tracked)
    alive = weakref.ref(gpu)
    host = HostMemory(64, MIB)
    engine = CopyEngine(MemoryLayout.from_tensors(gpu), host)
    array = host.array()
    engine.submit_pairs(1, "store", [(block, block) for block in range(64)])
    del gpu, host
    gc.collect()
    assert alive() is not None
    assert engine.wait(30) == [(1, [])]
    assert (array == 5).all()
    del engine
    gc.collect()
    assert alive() is None
    assert (array == 5).all()


def test_an_engine_in_a_reference_cycle_is_collected_while_it_copies() -> None:
    class Tracked(np.ndarray):
        engine: CopyEngine

    gpu = np.full((64, 2 * MIB), 5, np.uint8).view(Tracked)
    alive = weakref.ref(gpu)
    gpu.engine = CopyEngine(MemoryLayout.from_tensors(gpu), HostMemory(64, 2 * MIB))  # memory -> engine -> memory
    gpu.engine.submit_pairs(1, "store", [(block, block) for block in range(64)])
    del gpu
    gc.collect()
    assert alive() is None
