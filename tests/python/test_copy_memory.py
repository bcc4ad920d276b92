"""Described memory and host memory: what is taken, and what is refused by name."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import kvtier.config
import numpy as np
import pytest
from copy_layouts import torch_or_skip
from kvtier import ConfigError, CopyEngine, HostMemory, MemoryLayout


def refused(call: Callable[[], Any], argument: str, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.argument == argument, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_strides_and_addresses_are_those_of_the_view() -> None:
    storage = np.zeros((2, 10, 6, 8), np.float32)
    view = storage[:, 2:, 1:4]  # eight blocks, three rows of eight floats each
    layout = MemoryLayout.from_tensors([view], block_dim=1)
    start = storage.ctypes.data + (2 * 6 + 1) * 8 * 4
    assert layout.num_blocks == 8
    assert layout.block_bytes == 2 * 3 * 8 * 4
    assert layout.fragments == [(start + kv * 10 * 6 * 8 * 4, 6 * 8 * 4, 3 * 8 * 4) for kv in range(2)]
    assert repr(layout) == "MemoryLayout(num_blocks=8, block_bytes=192, fragments=2)"


def test_torch_and_numpy_are_described_alike() -> None:
    torch = torch_or_skip()
    for block_dim, cut in [(0, slice(3, None)), (1, slice(0, 2)), (2, slice(1, None))]:
        array = np.zeros((6, 4, 5, 8), np.int16)[cut]
        tensor = torch.from_numpy(array)
        expected = MemoryLayout.from_tensors([array], block_dim=block_dim)
        got = MemoryLayout.from_tensors([tensor], block_dim=block_dim)
        assert got.fragments == expected.fragments
        assert got.num_blocks == expected.num_blocks


def test_a_single_tensor_is_not_taken_for_a_list_of_its_rows() -> None:
    array = np.zeros((4, 6, 8), np.uint8)
    assert MemoryLayout.from_tensors(array).num_blocks == 4


def test_tensors_may_differ_in_shape_and_dtype() -> None:
    first, second = np.zeros((4, 10), np.float64), np.zeros((2, 4, 3), np.int8)
    both = [first.reshape(1, 4, 10), second]
    assert MemoryLayout.from_tensors(both, block_dim=1).block_bytes == 80 + 2 * 3


def test_layers_inside_one_block_are_joined() -> None:
    array = np.zeros((4, 3, 8), np.uint8)
    assert MemoryLayout.from_tensors([array[:, layer] for layer in range(3)]).fragments == [(array.ctypes.data, 24, 24)]


def test_bad_arrays_are_refused_by_name() -> None:
    good = np.zeros((4, 6, 8), np.uint8)
    read_only = good.copy()
    read_only.flags.writeable = False
    take = MemoryLayout.from_tensors
    refused(lambda: take([]), "tensors")
    refused(lambda: take([good, [1, 2]]), "tensors[1]", "list")
    refused(lambda: take({"layer": good}), "tensors[0]", "str")
    refused(lambda: take([good], block_dim=3), "block_dim", "0 .. 2")
    refused(lambda: take([good], block_dim=-1), "block_dim")
    refused(lambda: take([good[:, :, ::2]]), "tensors[0].strides", "contiguous")
    refused(lambda: take([good[:, ::2]]), "tensors[0].strides", "dimension 1")
    refused(lambda: take([good.transpose(0, 2, 1)]), "tensors[0].strides")
    refused(lambda: take([good[::-1]]), "tensors[0].strides", "negative")
    refused(lambda: take([good, read_only]), "tensors[1].flags.writeable")
    refused(lambda: take([good, np.zeros((5, 6, 8), np.uint8)]), "tensors[1].shape", "4 blocks")
    refused(lambda: take([np.zeros((4, 0), np.uint8)]), "tensors[0].shape")
    refused(lambda: take([np.zeros((0, 4), np.uint8)]), "tensors[0].shape")
    refused(lambda: take([np.zeros(4, object)]), "tensors[0].dtype")
    refused(lambda: take([np.zeros((9000, 2), np.uint8)], block_dim=1), "tensors[0].shape", "4096")
    refused(lambda: take([np.broadcast_to(good[:1], (4, 6, 8)).view()]), "tensors[0].flags.writeable")
    refused(lambda: take([good, good]), "tensors", "in common")
    refused(lambda: take([good, good[:, :1]]), "tensors", "in common")


def test_bad_torch_tensors_are_refused_by_name() -> None:
    torch = torch_or_skip()
    take = MemoryLayout.from_tensors
    good = torch.zeros(4, 6, 8)
    refused(lambda: take([good, good.transpose(1, 2).contiguous().transpose(1, 2)]), "tensors[1].strides", "contiguous")
    refused(lambda: take([torch.zeros(4, 6, device="meta")]), "tensors[0].device", "meta", "cpu")
    refused(lambda: take([good.to_sparse()]), "tensors[0].layout", "sparse")
    refused(lambda: take([good[:1].expand(4, 6, 8)]), "tensors", "block_stride")
    if torch.cuda.is_available():
        refused(lambda: take([good.cuda()]), "tensors[0].device", "cuda")


def test_bad_descriptions_are_refused_by_name() -> None:
    refused(lambda: MemoryLayout([], 4, None), "fragments")
    refused(lambda: MemoryLayout([(64, 8, 9)], 4, None), "fragments[0].block_stride")
    refused(lambda: MemoryLayout([(64, 8, 8), (-1, 8, 8)], 4, None), "fragments[1].address")
    refused(lambda: MemoryLayout([(64, 8, 2**80)], 4, None), "fragments[0].bytes")
    refused(lambda: MemoryLayout([(64, 8, 8)], 0, None), "num_blocks")
    refused(lambda: MemoryLayout([(64, 8, 8)], 2**24 + 1, None), "num_blocks")


def test_host_memory_is_aligned_zero_and_exact() -> None:
    host = HostMemory(5, 5000)
    assert (host.num_blocks, host.block_bytes, host.slot_bytes, host.total_bytes) == (5, 5000, 8192, 5 * 8192)
    assert host.address % 4096 == 0
    array = host.array()
    assert (array.shape, array.dtype, array.strides) == ((5, 5000), np.uint8, (8192, 1))
    assert array.ctypes.data == host.address
    assert not array.any()
    array[4, 4999] = 7
    assert host.array()[4, 4999] == 7


def test_host_memory_lives_as_long_as_an_array_of_it() -> None:
    host = HostMemory(4, 1 << 20)
    arena = weakref.ref(host)
    array = host.array()[2]
    del host
    gc.collect()
    assert arena() is None
    array[:] = 9
    assert array.sum() == 9 << 20


def test_host_memory_is_touched_at_construction() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    host = HostMemory(64, 1 << 20)
    assert resident_bytes() - before > 60 << 20
    del host
    gc.collect()
    assert resident_bytes() - before < 8 << 20


def test_host_memory_sizes_are_refused_by_name() -> None:
    for num_blocks in (0, -1, 2**24 + 1, 2**80):
        refused(lambda num_blocks=num_blocks: HostMemory(num_blocks, 4096), "num_blocks")
    for block_bytes in (0, -1, 2**62, 2**80):
        refused(lambda block_bytes=block_bytes: HostMemory(8, block_bytes), "block_bytes")


def test_host_memory_beyond_the_machine_is_refused_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: HostMemory(2**24, 1 << 24), "num_blocks", "available")
    monkeypatch.setattr(kvtier.config, "available_host_bytes", lambda: 3 * 8192)
    refused(lambda: HostMemory(4, 5000), "num_blocks", "at most 3", str(4 * 8192))
    assert HostMemory(3, 5000).num_blocks == 3


def test_both_sides_must_fit_each_other() -> None:
    gpu = MemoryLayout.from_tensors(np.zeros((4, 64), np.uint8))
    refused(lambda: CopyEngine(gpu, HostMemory(4, 65)), "cpu.block_bytes", "64")
    host = HostMemory(4, 64)
    itself = MemoryLayout.from_tensors(host.array())
    refused(lambda: CopyEngine(itself, host), "gpu", "apart")


def test_importing_needs_neither_numpy_nor_torch() -> None:
    code = "import sys, kvtier, kvtier.copy, kvtier.memory; print({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_names_are_imported_at_first_use() -> None:
    code = (
        "import sys, kvtier; a = 'kvtier.copy' in sys.modules; kvtier.CopyEngine; print(a, dir(kvtier)); kvtier.Nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("False [")
    assert "'HostMemory'" in done.stdout
    assert "AttributeError: module 'kvtier' has no attribute 'Nothing'" in done.stderr
