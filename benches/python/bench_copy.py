"""Host-to-host speed of the copy engine, beside a plain memmove with as many threads, in interleaved rounds.

Run: python benches/python/bench_copy.py [--blocks 128] [--block-bytes 2097152] [--threads 1,2] [--rounds 15]

Both sides copy the same scattered blocks between the same two memories. The plain copy is one `ctypes.memmove` per
block (the C library's, without the interpreter lock), its blocks dealt out to standing threads.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from kvtier import CopyEngine, HostMemory, MemoryLayout


def blocks_in_turn(num_blocks: int, scattered: bool) -> list[tuple[int, int]]:
    """Pairs over all blocks: scattered, so that nothing merges, or in order, so that all of it does."""
    destinations = list(range(num_blocks))
    if scattered:
        random.Random(7).shuffle(destinations)
    return list(enumerate(destinations))


def measure(num_threads: int, gpu: np.ndarray, host: HostMemory, scattered: bool, rounds: int) -> dict[str, float]:
    """Seconds of a round, best and median of each side, and how they compare."""
    num_blocks, block_bytes = gpu.shape
    pairs = np.array(blocks_in_turn(num_blocks, scattered), np.int32)
    rows = [
        (host.address + int(cpu) * host.slot_bytes, gpu.ctypes.data + int(block) * gpu.strides[0])
        for block, cpu in pairs
    ]
    shares = [rows[start::num_threads] for start in range(num_threads)]

    def plain_share(share: list[tuple[int, int]]) -> None:
        for destination, source in share:
            ctypes.memmove(destination, source, block_bytes)

    engine_s: list[float] = []
    plain_s: list[float] = []
    with (
        CopyEngine(MemoryLayout.from_tensors(gpu), host, num_threads=num_threads) as engine,
        ThreadPoolExecutor(num_threads) as pool,
    ):

        def by_engine(ticket: int) -> float:
            start = time.perf_counter()
            engine.submit_pairs(ticket, "store", pairs)
            if engine.wait(60) != [(ticket, [])]:
                raise SystemExit("the copy did not finish within 60 s")
            return time.perf_counter() - start

        def plainly(_: int) -> float:
            start = time.perf_counter()
            list(pool.map(plain_share, shares))
            return time.perf_counter() - start

        for round_ in range(rounds + 2):
            # Who goes first alternates, so that neither always finds the caches that the other left.
            sides = [(by_engine, engine_s), (plainly, plain_s)]
            for side, seconds in sides if round_ % 2 else reversed(sides):
                took = side(round_)
                if round_ >= 2:  # the first two warm up
                    seconds.append(took)
    if not np.array_equal(host.array()[pairs[:, 1]], gpu[pairs[:, 0]]):
        raise SystemExit("bytes differ")
    gb = num_blocks * block_bytes / 1e9
    return {
        "threads": num_threads,
        "scattered": scattered,
        "engine_best_gb_s": gb / min(engine_s),
        "engine_median_gb_s": gb / statistics.median(engine_s),
        "plain_best_gb_s": gb / min(plain_s),
        "plain_median_gb_s": gb / statistics.median(plain_s),
        "best_ratio": min(plain_s) / min(engine_s),
        "median_ratio": statistics.median(plain_s) / statistics.median(engine_s),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead")
    options = parser.parse_args()

    gpu = np.random.default_rng(7).integers(0, 256, (options.blocks, options.block_bytes), np.uint8)
    host = HostMemory(options.blocks, options.block_bytes)
    if not options.json:
        print(f"{options.blocks} blocks of {options.block_bytes} bytes, {options.rounds} rounds; GB/s as best (median)")
        print(f"{'threads':>7} {'blocks':>10} {'engine':>16} {'plain memmove':>16} {'ratio':>14}")
    for num_threads in map(int, options.threads.split(",")):
        for scattered in (True, False):
            row = measure(num_threads, gpu, host, scattered, options.rounds)
            if options.json:
                print(json.dumps(row))
                continue
            figures = [
                f"{row[f'{side}_best_gb_s']:.2f} ({row[f'{side}_median_gb_s']:.2f})" for side in ("engine", "plain")
            ]
            ratio = f"{row['best_ratio']:.2f} ({row['median_ratio']:.2f})"
            order = "scattered" if scattered else "in order"
            print(f"{num_threads:>7} {order:>10} {figures[0]:>16} {figures[1]:>16} {ratio:>14}")


if __name__ == "__main__":
    main()
