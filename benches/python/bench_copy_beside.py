"""What a Python program notices while 512 MiB move: its rate, the time to submit, and how fast host memory is ready.

Run: python benches/python/bench_copy_beside.py [--mib 512] [--tickets 1000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from kvtier import CopyEngine, HostMemory, MemoryLayout

MIB = 1 << 20


def turns_until(deadline: float) -> int:
    """Turns of a loop of plain Python until a point in time."""
    turns = 0
    while time.perf_counter() < deadline:
        turns += 1
    return turns


def rate_beside(engine: CopyEngine, num_blocks: int, ticket: int) -> tuple[float, float]:
    """Turns per second of the loop alone, and while blocks are copied."""
    start = time.perf_counter()
    alone = turns_until(start + 0.05) / (time.perf_counter() - start)
    engine.submit_pairs(ticket, "store", [(block, block) for block in range(num_blocks)])
    turns, start = 0, time.perf_counter()
    while not engine.poll():
        turns += turns_until(time.perf_counter() + 0.005)
    return alone, turns / (time.perf_counter() - start)


def submit_times(engine: CopyEngine, num_blocks: int, num_tickets: int) -> tuple[list[float], bool]:
    """Seconds of each small submission behind a large one, and whether the large one still ran after the last."""
    engine.submit_pairs(1_000_000, "store", [(block, block) for block in range(num_blocks)])
    times = []
    for ticket in range(num_tickets):
        pairs = np.array([(num_blocks + ticket, num_blocks + ticket)], np.int32)
        start = time.perf_counter()
        engine.submit_pairs(ticket, "store", pairs)
        times.append(time.perf_counter() - start)
    first = engine.poll()
    missing = num_tickets + 1 - len(first)
    while missing:
        missing -= len(engine.wait(60))
    return times, not first


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tickets", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    block_bytes = MIB // 2
    num_blocks = options.mib * MIB // block_bytes
    gpu = np.ones((num_blocks + options.tickets, block_bytes), np.uint8)
    for round_ in range(options.rounds):
        start = time.perf_counter()
        host = HostMemory(num_blocks + options.tickets, block_bytes)
        ready = host.total_bytes / (time.perf_counter() - start) / 1e9
        with CopyEngine(MemoryLayout.from_tensors(gpu), host) as engine:
            alone, beside = rate_beside(engine, num_blocks, 1_000_001)
            times, behind = submit_times(engine, num_blocks, options.tickets)
        print(
            f"round {round_}: host memory ready at {ready:.2f} GB/s; Python keeps {beside / alone:.2f} of its rate; "
            f"submit median {statistics.median(times) * 1e6:.0f} us, max {max(times) * 1e6:.0f} us, "
            f"{sum(each >= 0.001 for each in times)} of {len(times)} at 1 ms or more"
            f"{'' if behind else ' (the copies ended before the last submission)'}"
        )
        del host


if __name__ == "__main__":
    main()
