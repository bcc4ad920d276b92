"""What it costs a short call to release the interpreter lock: alone, and while another thread runs Python code.

Run: python benches/python/bench_interpreter_lock.py

Two functions of the C library are called through ctypes, once so that the lock is released around them (CDLL), once so
that it is kept (PyDLL): `getppid`, which is short, and a `memset` that takes about as long as the longest common call
of the table, a 1280-block hit, which is timed beside them. The difference is what releasing would add to a call.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable

from kvtier import BlockTable
from workload import BLOCK_SIZE

ROUNDS = 9
MEMSET_BYTES = 1 << 20


def per_call_us(call: Callable[[], object], num_calls: int) -> float:
    """Microseconds of one call, the mean of many."""
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return 1e6 * (time.perf_counter() - start) / num_calls


def main() -> None:
    """Print the figures, minimum and median of interleaved rounds."""
    releasing, keeping = ctypes.CDLL(None), ctypes.PyDLL(None)
    memory = ctypes.create_string_buffer(MEMSET_BYTES)
    table = BlockTable(2000, 0, BLOCK_SIZE)
    tokens = range(1280 * BLOCK_SIZE + 1)
    digests = table.block_hashes(tokens)
    table.admit_hashed(0, digests, len(tokens))
    table.commit(0, len(tokens))
    table.release(0)

    def admission() -> None:
        table.admit_hashed(1, digests, len(tokens))
        table.release(1)

    cases = {
        "getppid, lock kept": (keeping.getppid, 20_000, 2_000),
        "getppid, lock released": (releasing.getppid, 20_000, 2_000),
        "memset, lock kept": (lambda: keeping.memset(memory, 0, MEMSET_BYTES), 500, 100),
        "memset, lock released": (lambda: releasing.memset(memory, 0, MEMSET_BYTES), 500, 20),
        "1280-block hit": (admission, 500, 100),
    }
    for beside in (False, True):
        is_over = threading.Event()

        def spin(is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                sum(range(100))

        other = threading.Thread(target=spin)
        if beside:
            other.start()
        times: dict[str, list[float]] = {name: [] for name in cases}
        try:
            for _ in range(ROUNDS):
                for name, (call, alone, shared) in cases.items():
                    times[name].append(per_call_us(call, shared if beside else alone))
        finally:
            is_over.set()
            if beside:
                other.join()
        print("beside a thread that runs Python code" if beside else "alone")
        for name, values in times.items():
            print(f"  {name:24} {min(values):10.3f} / {statistics.median(values):10.3f} us")


if __name__ == "__main__":
    main()
