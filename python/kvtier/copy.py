"""The copy engine: moves blocks between the engine's memory and host memory on threads of its own."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvtier._core import CopyWorkers
from kvtier.errors import ConfigError
from kvtier.memory import HostMemory, MemoryLayout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

__all__ = ["CopyEngine", "CopyPlan"]

_EXIT_TIMEOUT_S = 3.0
_MAX_ID = 2**31 - 1


class CopyPlan(Protocol):
    """What `CopyEngine.submit` takes; `kvtier.Plan` is one."""

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Copies Cpu to Gpu: shape (n, 2), int32, rows (Cpu block id, Gpu block id)."""

    @property
    def stores(self) -> npt.NDArray[np.int32]:
        """Copies Gpu to Cpu: shape (n, 2), int32, rows (Gpu block id, Cpu block id)."""

    @property
    def load_ticket(self) -> int | None:
        """Ticket of `loads`; None if there are none."""

    @property
    def store_ticket(self) -> int | None:
        """Ticket of `stores`; None if there are none."""


class CopyEngine:
    """Copies blocks between described memory and host memory, beside whatever else the program does.

    Submitting checks and queues; threads of the engine copy, without the interpreter lock; `poll` or `wait` give the
    ends. Loads go before stores that wait. Tickets are not ordered among each other otherwise, so a copy that needs the
    result of another is submitted after the other was reported; until then its blocks are refused. While a ticket is
    open, nobody else may write its source blocks or touch its destination blocks.

    The engine keeps both memories allocated. Leaving the interpreter without `close` is safe: copies are cut short.
    Usable from any thread. After a fork, the child's calls raise TransferError. Leaving a `with` block calls `close`,
    without waiting for queued copies if an exception is the reason.

    Args:
        gpu: The engine's memory.
        cpu: The host memory, of the same bytes per block, and apart from `gpu`.
        num_threads: Threads that copy, 1 .. 64. Several share large tickets.
        max_queued: Most tickets in the engine, from submission until the report is collected, 1 .. 2**20.

    Raises:
        ConfigError: An argument is outside its limits, the two memories do not fit each other, or `gpu` is on a GPU.
        TransferError: The system refused to start a thread.
    """

    def __init__(self, gpu: MemoryLayout, cpu: HostMemory, num_threads: int = 1, max_queued: int = 1024) -> None:
        if not isinstance(gpu, MemoryLayout):
            raise TypeError(f"gpu: a MemoryLayout is wanted, not {type(gpu).__name__}")
        if not isinstance(cpu, HostMemory):
            raise TypeError(f"cpu: a HostMemory is wanted, not {type(cpu).__name__}")
        if gpu.device is not None:
            limit = "None: this engine copies with the processor, kvtier.cuda.CudaCopyEngine copies from and to a GPU"
            raise ConfigError("gpu.device", gpu.device, limit)
        self._workers = CopyWorkers(gpu._described, gpu._owner, cpu._arena, num_threads, max_queued)
        self._gpu = gpu
        self._cpu = cpu
        _open_workers.add(self._workers)

    @property
    def gpu(self) -> MemoryLayout:
        """The engine's memory."""
        return self._gpu

    @property
    def cpu(self) -> HostMemory:
        """The host memory."""
        return self._cpu

    def submit(self, plan: CopyPlan) -> None:
        """Queue the loads and stores of a plan, all or none. Does not wait for copies.

        Raises:
            ConfigError: A block id is out of range, a destination occurs twice, or a ticket is missing or in use.
            TransferError: The queue is full, a block is part of an unfinished copy, or the engine is closed.
        """
        try:
            tickets, lists = (plan.load_ticket, plan.store_ticket), (plan.loads, plan.stores)
        except AttributeError as error:
            raise TypeError(f"plan: a plan of loads and stores is wanted, not {type(plan).__name__}") from error
        loads, stores = _as_pairs("loads", lists[0]), _as_pairs("stores", lists[1])
        self._workers.submit_plan(tickets[0], loads, tickets[1], stores)

    def submit_pairs(self, ticket: int, direction: Literal["load", "store"], pairs: npt.ArrayLike) -> None:
        """Queue copies under a ticket. Does not wait for them.

        Args:
            ticket: A number of the caller's, 0 or more, not in use in this engine.
            direction: `"load"`, Cpu to Gpu, or `"store"`, Gpu to Cpu.
            pairs: Rows (source block id, destination block id): shape (n, 2), integers. May be empty.

        Raises:
            ConfigError: As `submit`, or the direction is none of the two.
            TransferError: As `submit`.
        """
        self._workers.submit(ticket, direction, _as_pairs("pairs", pairs))

    def poll(self) -> list[tuple[int, list[int]]]:
        """What has finished since the last call of `poll` or `wait`, in that order; never waits for a copy.

        Returns:
            Per ticket (ticket, indices of the pairs that did not copy, ascending). What is at the destination of such a
            pair is not defined.

        Raises:
            TransferError: This process was forked from the engine's.
        """
        return self._workers.poll()

    def wait(self, timeout_s: float) -> list[tuple[int, list[int]]]:
        """As `poll`, but wait for the first ticket to finish, at most `timeout_s` seconds.

        Lets other Python threads run, and raises what a signal handler raises, within about 50 ms. Once the engine is
        closed and everything is collected, returns at once.

        Args:
            timeout_s: 0 .. 86400.

        Raises:
            ConfigError: The time is outside its limits.
            TransferError: This process was forked from the engine's.
        """
        return self._workers.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse new tickets, let the others finish for at most `timeout_s` seconds, then end the threads.

        What has not been copied by then is reported as failed; `poll` still gives the reports. Ending the threads takes
        milliseconds, as each has at most 2 MiB to finish. Closing again does nothing.

        Raises:
            ConfigError: The time is outside 0 .. 86400.
            TransferError: A thread did not end within 2 s more. It keeps both memories.
        """
        self._workers.close(timeout_s)
        _open_workers.discard(self._workers)

    def stats(self) -> dict[str, int | float]:
        """Counters since construction, and gauges of now.

        Counters: `num_tickets` accepted, `num_finished_tickets`, `num_refused_tickets` (queue full), `num_pairs`
        accepted, `num_failed_pairs`, `num_pieces` (runs times fragments that the accepted pairs were merged into),
        `load_bytes` and `store_bytes` copied, `load_seconds` and `store_seconds` (of all threads together),
        `num_panics` (bugs).

        Gauges: `queue_depth` (tickets that wait or run), `num_uncollected` (finished, not collected).

        Raises:
            TransferError: This process was forked from the engine's.
        """
        return self._workers.stats()

    def inject_failures(
        self, direction: Literal["load", "store"], pairs: Iterable[int] | None = None, num_tickets: int = 1
    ) -> None:
        """Make copies fail, to test what stands above the engine.

        The pairs at these indices of the next `num_tickets` tickets of this direction are checked as always, not
        copied, and reported as failed. Replaces what was injected for the direction before; 0 tickets: nothing fails.

        Args:
            direction: `"load"` or `"store"`.
            pairs: Indices into the tickets' lists, those beyond a list's end being without effect; None: all pairs.
            num_tickets: Tickets that will fail.

        Raises:
            ConfigError: An argument is outside its limits.
            TransferError: This process was forked from the engine's.
        """
        self._workers.inject_failures(direction, None if pairs is None else list(pairs), num_tickets)

    def __enter__(self) -> CopyEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if kind is None else self.close(0.0)

    def __repr__(self) -> str:
        return f"CopyEngine(gpu={self._gpu!r}, cpu={self._cpu!r})"


def _as_pairs(name: str, pairs: Any) -> npt.NDArray[np.int32]:
    """Pairs as an array of shape (n, 2), int32; the array itself if it is one."""
    import numpy as np

    try:
        array = np.asarray(pairs)
    except (ValueError, TypeError, OverflowError) as error:
        shape = "shape (n, 2), integers: (source block id, destination block id)"
        raise ConfigError(name, f"{type(pairs).__name__} that makes no array ({error})", shape) from error
    if array.dtype == np.int32 and array.ndim == 2:
        return array
    if array.size == 0 and array.ndim <= 2:
        return np.empty((0, 2), np.int32)
    if array.dtype.kind not in "iu":
        raise ConfigError(name, f"dtype {array.dtype}", "integers")
    if array.ndim != 2:
        raise ConfigError(name, f"shape {array.shape}", "shape (n, 2): (source block id, destination block id)")
    if array.min() < -_MAX_ID or array.max() > _MAX_ID:  # the core names the pair where int32 can hold the ids
        raise ConfigError(name, f"block ids {array.min()} .. {array.max()}", f"block ids in 0 .. {_MAX_ID}")
    return array.astype(np.int32)


_open_workers: weakref.WeakSet[CopyWorkers] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End the threads of all engines, so that none touches memory while the interpreter takes itself apart."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    workers = list(_open_workers)
    for each in workers:
        each.request_stop()
    ended = [each.stop(max(0.0, deadline - time.monotonic())) for each in workers]
    if not all(ended):
        print("kvtier: a copy thread did not end in time; its memory is kept to the end", file=sys.stderr)
