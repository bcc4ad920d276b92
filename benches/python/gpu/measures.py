"""What `bench_gpu.py` measures through kvtier's engine; needs a `Gpu` of tests/gpu, real or not."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu_memory import Gpu
from kvtier import HostMemory, MemoryLayout
from kvtier.cuda import CudaCopyEngine

LOAD_PATHS = ("merged", "batch", "kernel")
STORE_PATHS = ("merged", "batch", "gather")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One shape of work: so many blocks of one piece each, scattered so that no two of them merge."""

    block_bytes: int
    num_blocks: int
    rounds: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True)
class Measured:
    """A line of the table; `gb_per_s` is the median over the rounds."""

    what: str
    direction: str
    block_bytes: int
    num_blocks: int
    gb_per_s: float


def scattered_pairs(first: int, num_blocks: int) -> npt.NDArray[np.int32]:
    """(n, 2) pairs from and to the ids from `first` on: even ones, so that no two are neighbours, in random order."""
    ids = first + 2 * np.arange(num_blocks, dtype=np.int32)
    random = np.random.default_rng(num_blocks)
    return np.stack([ids, random.permutation(ids)], axis=1)


class Transfer:
    """Memory for a case on both sides, twice over: blocks to load to and blocks to store from."""

    def __init__(self, gpu: Gpu, case: Case, load_path: str, store_path: str) -> None:
        self.case = case
        num_ids = 4 * case.num_blocks
        memory = gpu.memory(num_ids * case.block_bytes)
        layout = MemoryLayout([(memory.address, case.block_bytes, case.block_bytes)], num_ids, memory, device=gpu.index)
        self.engine = CudaCopyEngine(
            layout,
            HostMemory(num_ids, case.block_bytes),
            stream=gpu.stream,
            load_path=load_path,  # type: ignore[arg-type]
            store_path=store_path,  # type: ignore[arg-type]
        )
        self._loads = scattered_pairs(0, case.num_blocks)
        self._stores = scattered_pairs(2 * case.num_blocks, case.num_blocks)
        self._ticket = 0

    def start(self, direction: str) -> int:
        """Enqueue the copies of one direction; returns their ticket."""
        self._ticket += 1
        self.engine.submit_pairs(
            self._ticket,
            direction,  # type: ignore[arg-type]
            self._loads if direction == "load" else self._stores,
        )
        return self._ticket

    def finish(self, num_tickets: int) -> None:
        """Wait by asking all the time: a sleep would be longer than many a copy."""
        deadline = time.perf_counter() + TIMEOUT_S
        while num_tickets > 0:
            for ticket, failed in self.engine.poll():
                if failed:
                    raise SystemExit(f"ticket {ticket} failed: {self.engine.last_error}")
                num_tickets -= 1
            if time.perf_counter() > deadline:
                raise SystemExit(f"{num_tickets} tickets did not finish within {TIMEOUT_S} s")

    def gb_per_s(self, *directions: str) -> float:
        """Median over the rounds, after one that does not count; with two directions, both together."""
        seconds = []
        for _ in range(self.case.rounds + 1):
            start = time.perf_counter()
            for direction in directions:
                self.start(direction)
            self.finish(len(directions))
            seconds.append(time.perf_counter() - start)
        return len(directions) * self.case.total_bytes / statistics.median(seconds[1:]) / 1e9


def measure_paths(gpu: Gpu, case: Case) -> list[Measured]:
    """Each path alone in its direction, then both directions at once."""
    lines = []
    for load_path, store_path in zip(LOAD_PATHS, STORE_PATHS, strict=True):
        transfer = Transfer(gpu, case, load_path, store_path)
        with transfer.engine:
            for what, directions in (
                (load_path, ("load",)),
                (store_path, ("store",)),
                (f"{load_path} + {store_path}", ("load", "store")),
            ):
                rate = transfer.gb_per_s(*directions)
                name = directions[0] if len(directions) == 1 else "both"
                lines.append(Measured(f"kvtier {what}", name, case.block_bytes, case.num_blocks, rate))
            replaced = transfer.engine.stats()["num_replaced_groups"]
        if replaced:
            raise SystemExit(f"{load_path}/{store_path}: {replaced} groups took another path on this device")
    return lines


def render(device: dict[str, Any], lines: list[Measured], slowdowns: list[tuple[str, float]]) -> str:
    """The tables as Markdown."""
    text = [f"Measured on {device['name']}, driver {device['driver']}, torch {device['torch']}.", ""]
    text += ["| copy | direction | block bytes | blocks | GB/s |", "| --- | --- | ---: | ---: | ---: |"]
    for line in sorted(lines, key=lambda line: (line.direction, line.block_bytes, line.num_blocks)):
        text.append(
            f"| {line.what} | {line.direction} | {line.block_bytes} | {line.num_blocks} | {line.gb_per_s:.1f} |"
        )
    text += ["", "| copies meanwhile | time of a decode step, alone = 1 |", "| --- | ---: |"]
    text += [f"| {what} | {ratio:.3f} |" for what, ratio in slowdowns]
    return "\n".join(text)


def put_between(text: str, start: str, end: str, content: str) -> str:
    """The text with other content between two lines that it has once each."""
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"{start} and {end} have to be there once each")
    head, rest = text.split(start)
    return f"{head}{start}\n{content}\n{end}{rest.split(end)[1]}"
