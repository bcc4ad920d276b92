"""Scenario S12: copies are byte-exact for every layout, and merged; bad lists are refused before any byte moves."""

from __future__ import annotations

import numpy as np
import pytest
from copy_layouts import BLOCKS, LAYOUTS, Layout, make_layout, torch_or_skip
from kvtier import ConfigError, CopyEngine, HostMemory, MemoryLayout

STORES = [(0, 5), (1, 6), (2, 7), (9, 1), (4, 4)]
RUNS = 3  # (0, 5) .. (2, 7), then (9, 1), then (4, 4)
PERMUTED = {5: 12, 6: 3, 7: 4, 1: 0, 4: 9}  # host block: Gpu block that it is loaded to


class Rig:
    """An engine between a layout and noise-filled host memory."""

    def __init__(self, layout: Layout, kind: str, num_threads: int) -> None:
        self.layout = layout
        tensors = layout.tensors
        if kind == "torch":
            torch = torch_or_skip()
            tensors = [torch.from_numpy(tensor) for tensor in tensors]
        self.memory = MemoryLayout.from_tensors(tensors, block_dim=layout.block_dim)
        self.host = HostMemory(BLOCKS, self.memory.block_bytes)
        self.slots = np.frombuffer(memoryview(self.host._arena), np.uint8).reshape(BLOCKS, -1)
        self.slots[:] = np.arange(self.slots.size, dtype=np.uint32).reshape(self.slots.shape) % 253
        self.engine = CopyEngine(self.memory, self.host, num_threads=num_threads)
        self.ticket = 0

    def copy(self, direction: str, pairs: list[tuple[int, int]]) -> int:
        """Copies, and returns the number of pieces it took."""
        self.ticket += 1
        before = self.engine.stats()["num_pieces"]
        self.engine.submit_pairs(self.ticket, direction, pairs)
        assert self.engine.wait(30) == [(self.ticket, [])]
        return self.engine.stats()["num_pieces"] - before


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return make_layout(request.param)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_s12_bytes_and_pieces(layout: Layout, kind: str, num_threads: int) -> None:
    rig = Rig(layout, kind, num_threads)
    assert len(rig.memory.fragments) == layout.fragments
    block_bytes = rig.memory.block_bytes
    contents = [layout.block_bytes(block) for block in range(BLOCKS)]
    assert {len(content) for content in contents} == {block_bytes}
    assert len(set(contents)) == BLOCKS
    gpu_before, cpu_before = layout.storage.copy(), rig.slots.copy()

    assert rig.copy("store", STORES) == RUNS * layout.fragments
    expected = cpu_before.copy()
    for gpu, cpu in STORES:
        expected[cpu, :block_bytes] = np.frombuffer(contents[gpu], np.uint8)
    np.testing.assert_array_equal(rig.slots, expected)  # slot padding and untouched slots included
    np.testing.assert_array_equal(layout.storage, gpu_before)

    for block in range(BLOCKS):
        for part in layout.block(block):
            part[...] = 0
    zeroed = layout.storage.copy()
    used = layout.used()
    assert (zeroed[used] == 0).all()
    assert (zeroed[~used] == 0xEE).all()

    # Host blocks 6 and 7 go to Gpu blocks 3 and 4: one run of two, and three of one.
    assert rig.copy("load", list(PERMUTED.items())) == 4 * layout.fragments
    stored = {cpu: gpu for gpu, cpu in STORES}
    loaded = {gpu: contents[stored[cpu]] for cpu, gpu in PERMUTED.items()}
    for block in range(BLOCKS):
        assert layout.block_bytes(block) == loaded.get(block, bytes(block_bytes))
    np.testing.assert_array_equal(layout.storage[~used], zeroed[~used])  # guards and padding
    np.testing.assert_array_equal(rig.slots, expected)


@pytest.mark.parametrize(
    ("direction", "pairs", "argument"),
    [
        ("store", [(0, 5), (16, 6)], "pairs[1]"),
        ("store", [(0, 5), (1, 16)], "pairs[1]"),
        ("load", [(0, 5), (1, 16)], "pairs[1]"),
        ("load", [(16, 0), (1, 2)], "pairs[0]"),
        ("load", [(0, 5), (-1, 6)], "pairs[1]"),
        ("store", [(0, 5), (1, 6), (2, 5)], "pairs[2]"),
        ("load", [(0, 5), (1, 6), (2, 5)], "pairs[2]"),
    ],
)
def test_s12_bad_lists_are_refused_before_any_byte_moves(
    layout: Layout, direction: str, pairs: list[tuple[int, int]], argument: str
) -> None:
    rig = Rig(layout, "numpy", 1)
    gpu_before, cpu_before, stats = layout.storage.copy(), rig.slots.copy(), rig.engine.stats()
    with pytest.raises(ConfigError) as caught:
        rig.engine.submit_pairs(1, direction, pairs)
    assert caught.value.argument == argument
    assert rig.engine.wait(0.02) == []
    assert rig.engine.stats() == stats
    np.testing.assert_array_equal(layout.storage, gpu_before)
    np.testing.assert_array_equal(rig.slots, cpu_before)
    # The good part of the list would have been copied, had it been alone.
    rig.copy(direction, pairs[:1] if argument != "pairs[0]" else pairs[1:])


def test_s12_shape_does_not_decide() -> None:
    """One shape, two layouts: what a block is follows from block_dim alone."""
    first, second = make_layout("L6-block-first"), make_layout("L6-block-second")
    assert first.tensors[0].shape == second.tensors[0].shape
    described = [MemoryLayout.from_tensors(it.tensors, block_dim=it.block_dim) for it in (first, second)]
    assert [it.num_blocks for it in described] == [BLOCKS, BLOCKS]
    assert [len(it.fragments) for it in described] == [1, 16]
    assert described[0].block_bytes == described[1].block_bytes
