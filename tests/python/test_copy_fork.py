"""After a fork the child is refused, by type, and neither hangs nor disturbs the parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from kvtier import CopyEngine, HostMemory, MemoryLayout, TransferError

MIB = 1 << 20


def exit_status_of_child(child: Callable[[], None]) -> int:
    """Forks, runs `child` in the child, and returns how it ended; kills it after 20 s."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12 warns: threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def test_a_child_is_refused_and_the_parent_goes_on() -> None:
    gpu = np.full((128, 2 * MIB), 7, np.uint8)
    host = HostMemory(128, 2 * MIB)
    engines = [CopyEngine(MemoryLayout.from_tensors(gpu), host, num_threads=2)]

    def child() -> None:
        engine = engines.pop()
        for call in (
            lambda: engine.submit_pairs(9, "store", [(0, 0)]),
            engine.poll,
            lambda: engine.wait(60),
            engine.stats,
            lambda: engine.inject_failures("load"),
        ):
            with pytest.raises(TransferError, match="forked"):
                call()
        engine.close()
        engine = None  # ends without waiting for threads that the child does not have
        fresh = CopyEngine(MemoryLayout.from_tensors(gpu[:2]), HostMemory(2, 2 * MIB))
        fresh.submit_pairs(1, "load", [(0, 0)])
        assert fresh.wait(10) == [(1, [])]
        fresh.close()

    for round_ in range(8):  # the lock of the queue is taken in some of them
        engines[0].submit_pairs(round_, "store", [(block, block) for block in range(128)])
        assert exit_status_of_child(child) == 0
        assert engines[0].wait(30) == [(round_, [])]
    assert (host.array() == 7).all()


def test_a_child_may_leave_by_the_interpreter() -> None:
    gpu = np.zeros((32, 2 * MIB), np.uint8)
    engine = CopyEngine(MemoryLayout.from_tensors(gpu), HostMemory(32, 2 * MIB))
    engine.submit_pairs(1, "store", [(block, block) for block in range(32)])

    def child() -> None:
        import atexit

        atexit._run_exitfuncs()  # what sys.exit would run in a child of os.fork

    assert exit_status_of_child(child) == 0
    assert engine.wait(30) == [(1, [])]


def test_a_fork_while_another_thread_waits() -> None:
    gpu = np.zeros((2, 4096), np.uint8)
    engine = CopyEngine(MemoryLayout.from_tensors(gpu), HostMemory(2, 4096))
    found: list[list[tuple[int, list[int]]]] = []
    waiter = threading.Thread(target=lambda: found.append(engine.wait(30)))
    waiter.start()
    time.sleep(0.05)

    def child() -> None:
        with pytest.raises(TransferError):
            engine.poll()

    assert exit_status_of_child(child) == 0
    engine.submit_pairs(1, "store", [(0, 0)])
    waiter.join(30)
    assert found == [[(1, [])]]
