"""`CudaCopyEngine` against CUDA's test double: bytes of scenario S12 on every path, and what waits for what."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from copy_layouts import BLOCKS, LAYOUTS, make_layout
from cuda_double import TIMEOUT_S, Double, Rig, double, double_library
from kvtier import BlockTable, ConfigError, TransferError
from kvtier.cuda import copier as copier_module

__all__ = ["double", "double_library"]

STORES = [(0, 5), (1, 6), (2, 7), (9, 1), (4, 4)]
RUNS = 3
PERMUTED = {5: 12, 6: 3, 7: 4, 1: 0, 4: 9}
PATHS = [("merged", "merged"), ("batch", "batch"), ("kernel", "gather")]


@pytest.fixture
def rig_of(double: Double) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(name: str = "L4", **options: Any) -> Rig:
        made.append(Rig(double, make_layout(name), **options))
        return made[-1]

    yield make
    for rig in made:
        rig.end()
    assert double.num_live_streams() == 0
    assert double.num_registered() == 0


@pytest.mark.parametrize("paths", PATHS, ids="/".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_s12_bytes_and_pieces(rig_of: Callable[..., Rig], name: str, paths: tuple[str, str]) -> None:
    rig = rig_of(name, load_path=paths[0], store_path=paths[1])
    layout, block_bytes = rig.layout, rig.memory.block_bytes
    contents = [layout.block_bytes(block) for block in range(BLOCKS)]
    gpu_before, cpu_before = layout.storage.copy(), rig.slots.copy()

    assert rig.copy("store", STORES) == RUNS * layout.fragments
    expected = cpu_before.copy()
    for gpu, cpu in STORES:
        expected[cpu, :block_bytes] = np.frombuffer(contents[gpu], np.uint8)
    np.testing.assert_array_equal(rig.slots, expected)
    np.testing.assert_array_equal(layout.storage, gpu_before)

    layout.storage[:] = 0
    rig.copy("load", list(PERMUTED.items()))
    used = np.zeros(BLOCKS, bool)
    for cpu, gpu in PERMUTED.items():
        assert layout.block_bytes(gpu) == expected[cpu, :block_bytes].tobytes()
        used[gpu] = True
    assert not any(any(layout.block_bytes(block)) for block in range(BLOCKS) if not used[block])
    assert not layout.storage[~layout.used()].any()  # guards and padding
    np.testing.assert_array_equal(rig.slots, expected)
    stats = rig.engine.stats()
    assert (stats["store_bytes"], stats["load_bytes"]) == (5 * block_bytes, 5 * block_bytes)
    kernels = paths[0] == "kernel"
    assert (stats["num_kernels"] > 0, stats["num_batch_copies"] > 0) == (kernels, paths[0] == "batch")
    assert stats["num_replaced_groups"] == 0
    assert stats["host_registered"] == 1


def test_a_bad_list_moves_nothing(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of()
    before = rig.layout.storage.copy(), rig.slots.copy()
    for direction, pairs in (("store", [(0, 1), (16, 2)]), ("load", [(0, 16)]), ("load", [(1, 2), (3, 2)])):
        with pytest.raises(ConfigError, match=r"pairs\["):
            rig.submit(direction, pairs)
    assert rig.engine.poll() == []
    np.testing.assert_array_equal(rig.layout.storage, before[0])
    np.testing.assert_array_equal(rig.slots, before[1])


def test_no_copy_crosses_the_border_of_two_registrations(
    rig_of: Callable[..., Rig], double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "CHUNK_BYTES", 5 * 4096)
    rig = rig_of(load_path="batch", store_path="gather")
    assert double.num_registered() == 4  # 5 + 5 + 5 + 1 slots
    pairs = [(block, block) for block in range(BLOCKS)]
    contents = [rig.block_on_gpu(block) for block in range(BLOCKS)]
    assert rig.copy("store", pairs) == 4 * rig.layout.fragments
    assert [rig.block_on_cpu(slot) for slot in range(BLOCKS)] == contents
    rig.layout.storage[:] = 0
    rig.copy("load", pairs)
    assert [rig.block_on_gpu(block) for block in range(BLOCKS)] == contents  # the double refuses a crossing copy


@pytest.mark.parametrize("paths", PATHS, ids="/".join)
def test_a_store_waits_for_the_step_that_writes_its_source(
    rig_of: Callable[..., Rig], double: Double, paths: tuple[str, str]
) -> None:
    rig = rig_of("L1", store_path=paths[1])
    written = np.full(rig.memory.block_bytes, 77, np.uint8)
    stream = ctypes.c_void_p(rig.stream)
    double.hold(stream)
    address = rig.memory.fragments[0][0] + 3 * rig.memory.fragments[0][1]
    double.copy_on(stream, ctypes.c_void_p(address), ctypes.c_void_p(written.ctypes.data), written.nbytes)
    ticket = rig.submit("store", [(3, 2)])
    assert rig.engine.wait(0.02) == []  # and no call has waited for the step
    double.let_go(stream)
    assert rig.engine.wait(TIMEOUT_S) == [(ticket, [])]
    assert rig.block_on_cpu(2) == written.tobytes()
    assert double.num_host_waits() == 0


@pytest.mark.parametrize("paths", PATHS, ids="/".join)
def test_a_load_waits_for_the_last_reader_of_its_destination(
    rig_of: Callable[..., Rig], double: Double, paths: tuple[str, str]
) -> None:
    rig = rig_of("L1", load_path=paths[0])
    before = rig.block_on_gpu(3)
    read = np.zeros(rig.memory.block_bytes, np.uint8)
    stream = ctypes.c_void_p(rig.stream)
    double.hold(stream)
    address = rig.memory.fragments[0][0] + 3 * rig.memory.fragments[0][1]
    double.copy_on(stream, ctypes.c_void_p(read.ctypes.data), ctypes.c_void_p(address), read.nbytes)
    ticket = rig.submit("load", [(2, 3)])
    assert rig.engine.wait(0.02) == []
    double.let_go(stream)
    assert rig.engine.wait(TIMEOUT_S) == [(ticket, [])]
    assert read.tobytes() == before
    assert rig.block_on_gpu(3) == rig.block_on_cpu(2) != before


def test_layers_arrive_in_waves(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of("L4")
    double.set_library_delay_us(100_000)  # a wave takes longer than the compute stream takes to read a layer
    parts = np.zeros((3, 512), np.uint8)
    last_before = rig.block_on_gpu(3)[-512:]
    ticket = rig.submit("load", [(2, 3)])
    for layer, (address, stride, size) in enumerate(rig.memory.fragments):
        rig.engine.wait_layer(ticket, layer)
        source = ctypes.c_void_p(address + 3 * stride)
        double.copy_on(ctypes.c_void_p(rig.stream), ctypes.c_void_p(parts[layer].ctypes.data), source, size)
        if layer == 0:  # and does not wait for the others
            double.drain(ctypes.c_void_p(rig.stream))
            assert rig.block_on_gpu(3)[-size:] == last_before
    assert rig.engine.wait(TIMEOUT_S) == [(ticket, [])]
    double.drain(ctypes.c_void_p(rig.stream))
    assert parts.tobytes() == rig.block_on_cpu(2)
    assert parts[2].tobytes() != last_before
    with pytest.raises(ConfigError, match="ticket"):
        rig.engine.wait_layer(ticket, 0)
    with pytest.raises(ConfigError, match="layer"):
        rig.engine.wait_layer(ticket, 3)


def test_blocks_of_open_tickets_are_refused(rig_of: Callable[..., Rig], double: Double) -> None:
    rig = rig_of(max_queued=2)
    stream = ctypes.c_void_p(rig.stream)
    double.hold(stream)
    first = rig.submit("store", [(3, 2)])
    with pytest.raises(TransferError, match="Cpu block 2 is the destination of ticket 1, still in flight"):
        rig.submit("load", [(2, 9)])
    second = rig.submit("load", [(5, 5)])
    with pytest.raises(TransferError, match="the queue is full"):
        rig.submit("load", [(6, 6)])
    with pytest.raises(TransferError, match="2 tickets have not finished"):
        rig.engine.close(0.02)
    double.let_go(stream)
    ended = rig.engine.wait(TIMEOUT_S)
    while len(ended) < 2:
        ended += rig.engine.wait(TIMEOUT_S)
    assert sorted(ended) == [(first, []), (second, [])]
    assert rig.engine.stats()["num_refused_tickets"] == 2
    with pytest.raises(TransferError, match="closed"):  # it was told to close, and has no ticket left
        rig.submit("load", [(2, 9)])


def test_it_serves_a_block_table(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of("L2", slots=64, load_path="kernel", store_path="gather")
    table = BlockTable(gpu_blocks=BLOCKS, cpu_blocks=64, block_size=4)
    contents: dict[tuple[int, int], bytes] = {}
    random = np.random.default_rng(1)
    hits = 0

    def step() -> None:
        rig.engine.submit(table.step())
        while rig.engine.stats()["queue_depth"]:
            for ticket, failed in rig.engine.wait(TIMEOUT_S):
                table.complete(ticket, failed=failed)
        for ticket, failed in rig.engine.poll():
            table.complete(ticket, failed=failed)

    for request in range(60):
        document = int(random.integers(6))
        tokens = [document * 100 + i for i in range(4 * 6 + 1)]
        found = table.admit(request, tokens)
        step()
        hits += found.cpu_hit_blocks
        blocks = table.block_ids(request)
        for position in range(6):
            if position < found.gpu_hit_blocks + found.cpu_hit_blocks:
                assert rig.block_on_gpu(blocks[position]) == contents[document, position]
                continue
            for part in rig.layout.block(blocks[position]):
                part[...] = random.integers(256, size=part.shape, dtype=np.uint8)
            contents[document, position] = rig.block_on_gpu(blocks[position])
        table.commit(request, len(tokens))
        step()
        table.release(request)
    assert hits > 50
    table.audit()
