"""The checks that run on a GPU, and, smaller, on CUDA's test double: exact bytes, ordering, random plans."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gpu_memory import Bytes, Gpu
from kvtier import HostMemory, MemoryLayout
from kvtier.cuda import CudaCopyEngine

BLOCKS = 16
TIMEOUT_S = 30
PATHS = [("merged", "merged"), ("batch", "batch"), ("kernel", "gather")]

# (offset, block stride, bytes) of each fragment: the layouts of scenario S12, then odd sizes and odd addresses.
LAYOUTS: dict[str, list[tuple[int, int, int]]] = {
    "block first": [(64, 1024, 1024)],
    "whole pages": [(64, 4096, 4096)],
    "keys and values first": [(64, 320, 320), (64 + BLOCKS * 320, 320, 320)],
    "padded": [(64, 640, 576)],
    "three layers": [(64 + layer * 9000, 512, 512) for layer in range(3)],
    "odd start": [(64 + 4093, 192, 192), (64 + 4093 + BLOCKS * 192, 192, 192)],
    "sixteen heads": [(64 + head * 512, 32, 32) for head in range(16)],
    "odd sizes": [(67, 341, 333), (9001, 1237, 1001), (30011, 8, 1)],
    "longer than a unit": [(48, 20011, 20001), (400_000, 70_000, 65_536)],
}


class Rig:
    """An engine between a layout on the GPU, full of noise, and host memory, with a model of both in plain arrays."""

    def __init__(self, gpu: Gpu, layout: str, load_path: str, store_path: str, seed: int = 0, **options: Any) -> None:
        self.gpu, self.random = gpu, np.random.default_rng(seed)
        self.parts = LAYOUTS[layout]
        self.gpu_bytes = self.random.integers(
            256, size=max(o + BLOCKS * stride for o, stride, _ in self.parts) + 64, dtype=np.uint8
        )
        self.memory = gpu.memory(self.gpu_bytes.size)
        self.memory.write(self.gpu_bytes)
        fragments = [(self.memory.address + offset, stride, size) for offset, stride, size in self.parts]
        described = MemoryLayout(fragments, BLOCKS, self.memory.owner, device=gpu.index)
        self.host = HostMemory(BLOCKS, described.block_bytes)
        self.host_view = np.frombuffer(memoryview(self.host._arena), np.uint8).reshape(BLOCKS, -1)
        self.host_view[:] = self.random.integers(256, size=self.host_view.shape, dtype=np.uint8)
        self.host_bytes = self.host_view.copy()
        self.engine = CudaCopyEngine(
            described, self.host, stream=gpu.stream, load_path=load_path, store_path=store_path, **options
        )
        self.ticket = 0

    def model(self, direction: str, pairs: list[tuple[int, int]]) -> None:
        """What the copies should do."""
        for source, destination in pairs:
            start = 0
            for offset, stride, size in self.parts:
                block, slot = (destination, source) if direction == "load" else (source, destination)
                on_gpu = self.gpu_bytes[offset + block * stride :][:size]
                on_cpu = self.host_bytes[slot, start : start + size]
                if direction == "load":
                    on_gpu[:] = on_cpu
                else:
                    on_cpu[:] = on_gpu
                start += size

    def submit(self, direction: str, pairs: list[tuple[int, int]]) -> int:
        self.ticket += 1
        self.engine.submit_pairs(self.ticket, direction, pairs)
        self.model(direction, pairs)
        return self.ticket

    def finish(self, num_tickets: int = 1) -> None:
        """Wait for tickets, all of which have to succeed."""
        ended: list[tuple[int, list[int]]] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(ended) < num_tickets and time.monotonic() < deadline:
            ended += self.engine.wait(1)
        assert len(ended) == num_tickets, f"{num_tickets - len(ended)} tickets are missing after {TIMEOUT_S} s"
        assert not any(failed for _, failed in ended), str(self.engine.last_error)

    def check(self) -> None:
        """Every byte of both sides: guards and padding too."""
        np.testing.assert_array_equal(self.memory.read(), self.gpu_bytes)
        np.testing.assert_array_equal(self.host_view, self.host_bytes)

    def block(self, content: Bytes, block: int) -> Bytes:
        """The fragments of a block in a copy of the whole GPU memory."""
        return np.concatenate([content[o + block * stride :][:size] for o, stride, size in self.parts])


def check_bytes(gpu: Gpu, layout: str, load_path: str, store_path: str) -> None:
    """Stores, then loads to other blocks; twice, so that staging memory and events are used again."""
    rig = Rig(gpu, layout, load_path, store_path, staging_bytes=1 << 17)
    with rig.engine:
        for _ in range(2):
            rig.submit("store", [(0, 5), (1, 6), (2, 7), (9, 1), (4, 4)])
            rig.finish()
            rig.check()
            rig.submit("load", [(5, 12), (6, 3), (7, 4), (1, 0), (4, 9), (12, 13), (13, 14)])
            rig.finish()
            rig.check()
        assert rig.engine.stats()["num_replaced_groups"] == 0, "a path was not there"
        assert rig.engine.stats()["host_registered"] == 1


def check_store_order(gpu: Gpu, load_path: str, store_path: str) -> None:
    """A store behind a slow step has the bytes that the step wrote, and nobody waited for it on the host."""
    rig = Rig(gpu, "block first", load_path, store_path)
    with rig.engine:
        rig.submit("store", [(0, 0)])  # whatever happens only once happens here
        rig.finish()
        content = rig.random.integers(256, size=1024, dtype=np.uint8)
        prepared = rig.memory.prepare(content)
        least_s = gpu.hold()
        start = time.perf_counter()
        rig.memory.write_later(64 + 3 * 1024, prepared)
        rig.gpu_bytes[64 + 3 * 1024 :][:1024] = content
        rig.submit("store", [(3, 2)])
        took_s = time.perf_counter() - start
        assert took_s < least_s, f"enqueuing took {took_s} s: it waited for the device"
        time.sleep(0.02)  # a copy that does not wait has moved by now
        assert rig.engine.poll() == []
        gpu.let_go()
        rig.finish()
        rig.check()


def check_load_order(gpu: Gpu, load_path: str, store_path: str) -> None:
    """A load behind a slow step that still reads the block does not disturb it; what follows sees the load."""
    rig = Rig(gpu, "block first", load_path, store_path)
    with rig.engine:
        rig.submit("load", [(0, 0)])
        rig.finish()
        before = rig.block(rig.gpu_bytes, 3)
        least_s = gpu.hold()
        start = time.perf_counter()
        read_before = rig.memory.read_later(64 + 3 * 1024, 1024)
        ticket = rig.submit("load", [(2, 3)])
        rig.engine.wait_layer(ticket, 0)
        read_after = rig.memory.read_later(64 + 3 * 1024, 1024)
        took_s = time.perf_counter() - start
        assert took_s < least_s, f"enqueuing took {took_s} s: it waited for the device"
        time.sleep(0.02)
        gpu.let_go()
        rig.finish()
        np.testing.assert_array_equal(read_before(), before)
        np.testing.assert_array_equal(read_after(), rig.block(rig.gpu_bytes, 3))
        rig.check()


def check_layers(gpu: Gpu, load_path: str, store_path: str) -> None:
    """Each layer can be read behind its own wave."""
    rig = Rig(gpu, "sixteen heads", load_path, store_path)
    with rig.engine:
        for _ in range(10):
            slots = rig.random.permutation(BLOCKS).tolist()
            ticket = rig.submit("load", list(zip(slots, range(BLOCKS), strict=True)))
            reads = []
            for layer, (offset, stride, _) in enumerate(rig.parts):
                rig.engine.wait_layer(ticket, layer)
                reads.append(rig.memory.read_later(offset, BLOCKS * stride))
            for (offset, stride, _), read in zip(rig.parts, reads, strict=True):
                np.testing.assert_array_equal(read(), rig.gpu_bytes[offset : offset + BLOCKS * stride])
            rig.finish()
        rig.check()


def check_random_plans(gpu: Gpu, layout: str, load_path: str, store_path: str, num_plans: int, seed: int) -> None:
    """Plans of blocks that no other ticket has, several in flight; every byte is compared now and then."""
    rig = Rig(gpu, layout, load_path, store_path, seed=seed, staging_bytes=1 << 15)
    busy: dict[int, tuple[set[int], set[int]]] = {}  # ticket: blocks, slots
    failed: list[tuple[int, list[int]]] = []

    def collect(ended: list[tuple[int, list[int]]]) -> None:
        for ticket, pairs in ended:
            del busy[ticket]
            if pairs:
                failed.append((ticket, pairs))

    def drain() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while busy:
            assert time.monotonic() < deadline, f"tickets {list(busy)} are missing"
            collect(rig.engine.wait(1))

    with rig.engine:
        for plan in range(num_plans):
            blocks = sorted(set(range(BLOCKS)).difference(*(taken for taken, _ in busy.values())))
            slots = sorted(set(range(BLOCKS)).difference(*(taken for _, taken in busy.values())))
            length = int(rig.random.integers(1, 9))
            if min(len(blocks), len(slots)) < length:
                collect(rig.engine.wait(TIMEOUT_S))
                continue
            if rig.random.integers(2):  # half of the plans have runs
                start = int(rig.random.integers(len(blocks) - length + 1))
                chosen = blocks[start : start + length], slots[:length]
            else:
                chosen = tuple(rig.random.choice(ids, length, replace=False).tolist() for ids in (blocks, slots))
            direction = "load" if rig.random.integers(2) else "store"
            pairs = list(zip(*(reversed(chosen) if direction == "load" else chosen), strict=True))
            busy[rig.submit(direction, pairs)] = set(chosen[0]), set(chosen[1])
            collect(rig.engine.poll())
            if plan % 100 == 99:
                drain()
                rig.check()
        drain()
        rig.check()
    assert not failed, f"{failed}: {rig.engine.last_error}"
