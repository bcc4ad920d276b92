"""The copy engine for GPU memory: the interface of `kvtier.CopyEngine`, on CUDA streams."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
import weakref
from typing import TYPE_CHECKING, Literal

from kvtier._core import OutlinedTickets
from kvtier.copy import _as_pairs
from kvtier.cuda.batches import BatchShape, LoadPath, StorePath, handle_of
from kvtier.cuda.copier import Copier
from kvtier.cuda.library import CudaError
from kvtier.errors import ConfigError, TransferError
from kvtier.memory import HostMemory, MemoryLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

    from kvtier.copy import CopyPlan

    _Outline = tuple[int, bool, npt.NDArray[np.uint64]]

_MAX_STAGING_BYTES = 1 << 40
_MAX_TIMEOUT_S = 86_400.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
_LAST_WAIT_S = 0.1


class CudaCopyEngine:
    """Copies blocks between a GPU and host memory, on one stream for loads and one for stores.

    `submit` enqueues and returns. The copies wait, on the device, for what the compute stream was given before: a store
    for the step that writes its source, a load for the last step that reads its destination. The host waits for
    neither, except in `close`, in `wait`, and where host memory could not be registered: CUDA then makes `submit` wait,
    a warning says so, and `stats()["host_registered"]` is 0.

    While a ticket is open its sources must not be written and its destinations not touched, except by work on a stream
    that `wait_layer` made wait. Tickets are otherwise as those of `kvtier.CopyEngine`: not ordered among each other,
    and blocks of open ones are refused. A ticket fails as a whole.

    The engine keeps both memories allocated. At exit and when it is garbage, copies are waited for, at most 2 s; memory
    that they use longer is never freed. Usable from any thread. After a fork, the child's calls raise TransferError.

    Args:
        gpu: The engine's memory, on a GPU.
        cpu: The host memory, of the same bytes per block. Registered with CUDA as long as the engine is open.
        stream: The compute stream: a handle, an object that has one (`cuda_stream` as in torch, `ptr` as in CuPy), or a
            function without arguments that returns either, asked at every `submit`. 0: CUDA's default stream.
        load_path: `"merged"`, one copy per run and fragment; `"batch"`, all rows in one call of the driver;
            `"kernel"`, a kernel of at most 12 CTAs that reads host memory. What device or driver do not have is
            replaced by `"merged"` and counted.
        store_path: `"merged"`, `"batch"`, or `"gather"`: a kernel collects a run on the device, one copy takes it over.
        staging_bytes: Device memory for `"gather"`, 0 .. 2**40; not taken for the other paths.
        max_queued: Most tickets in the engine, from submission until the report is collected, 1 .. 2**20.

    Raises:
        ConfigError: An argument is outside its limits, the two memories do not fit each other, or `gpu` is in host
            memory.
        TransferError: There is no CUDA extension, no device, or not enough device memory; CUDA's own text is in it.
    """

    def __init__(
        self,
        gpu: MemoryLayout,
        cpu: HostMemory,
        stream: object = 0,
        load_path: LoadPath = "merged",
        store_path: StorePath = "merged",
        staging_bytes: int = 16 << 20,
        max_queued: int = 1024,
    ) -> None:
        if not isinstance(gpu, MemoryLayout):
            raise TypeError(f"gpu: a MemoryLayout is wanted, not {type(gpu).__name__}")
        if not isinstance(cpu, HostMemory):
            raise TypeError(f"cpu: a HostMemory is wanted, not {type(cpu).__name__}")
        if gpu.device is None:
            limit = "memory on a GPU: kvtier.CopyEngine copies between two host memories"
            raise ConfigError("gpu.device", gpu.device, limit)
        if not 0 <= operator.index(staging_bytes) <= _MAX_STAGING_BYTES:
            raise ConfigError("staging_bytes", staging_bytes, f"0 .. {_MAX_STAGING_BYTES}")
        self._gpu, self._cpu, self._stream = gpu, cpu, stream
        self._batches = BatchShape(gpu, cpu, load_path, store_path)
        # Two memories that do not fit each other are refused before anything is registered.
        OutlinedTickets(gpu._described, cpu._arena, 1, max_queued)
        self._copier = Copier(gpu, cpu, staging_bytes if store_path == "gather" else 0)
        self._finalizer = weakref.finalize(self, self._copier.release)
        self._tickets = OutlinedTickets(gpu._described, cpu._arena, self._copier.slots_per_chunk, max_queued)
        self._lock = threading.Lock()
        self._accepts, self._closed = True, False
        self._ended: list[tuple[int, list[int]]] = []
        self._last_error: CudaError | None = None
        self._open: dict[int, tuple[bool, int]] = {}
        self._counters = dict.fromkeys(
            (
                "num_tickets",
                "num_finished_tickets",
                "num_refused_tickets",
                "num_pairs",
                "num_failed_pairs",
                "num_pieces",
                "load_bytes",
                "store_bytes",
            ),
            0,
        )
        self._last_counts: dict[str, int] = {}

    @property
    def gpu(self) -> MemoryLayout:
        """The engine's memory."""
        return self._gpu

    @property
    def cpu(self) -> HostMemory:
        """The host memory."""
        return self._cpu

    @property
    def last_error(self) -> CudaError | None:
        """Why the last ticket that failed did so; None if none has."""
        return self._last_error

    def submit(self, plan: CopyPlan) -> None:
        """Enqueue the loads and stores of a plan, behind what the compute stream has now. Does not wait for copies.

        If CUDA refuses the stores when the loads are already under way, the stores are reported as failed.

        Raises:
            ConfigError: A block id is out of range, a destination occurs twice, or a ticket is missing or in use.
            TransferError: Too many tickets are open, a block is part of an unfinished copy, the compute stream is
                capturing a graph, CUDA refused, or the engine is closed. Nothing was enqueued.
        """
        try:
            tickets, lists = (plan.load_ticket, plan.store_ticket), (plan.loads, plan.stores)
        except AttributeError as error:
            raise TypeError(f"plan: a plan of loads and stores is wanted, not {type(plan).__name__}") from error
        loads, stores = _as_pairs("loads", lists[0]), _as_pairs("stores", lists[1])
        num_tickets = sum(ticket is not None for ticket in tickets)
        self._submit(num_tickets, lambda: self._tickets.open(tickets[0], loads, tickets[1], stores))

    def submit_pairs(self, ticket: int, direction: Literal["load", "store"], pairs: npt.ArrayLike) -> None:
        """Enqueue copies under a ticket. Does not wait for them.

        Args:
            ticket: A number of the caller's, 0 or more, not in use in this engine.
            direction: `"load"`, Cpu to Gpu, or `"store"`, Gpu to Cpu.
            pairs: Rows (source block id, destination block id): shape (n, 2), integers. May be empty.

        Raises:
            ConfigError: As `submit`, or the direction is none of the two.
            TransferError: As `submit`.
        """
        listed = _as_pairs("pairs", pairs)
        self._submit(1, lambda: self._tickets.open_pairs(ticket, direction, listed))

    def _submit(self, num_tickets: int, open_tickets: Callable[[], Sequence[_Outline]]) -> None:
        self._copier.check_process()
        stream = handle_of(self._stream)
        with self._lock:
            if not self._accepts:
                raise TransferError("the copy engine is closed")
            try:
                outlines = open_tickets()
            except TransferError:
                self._counters["num_refused_tickets"] += num_tickets
                raise
            if not outlines:
                return
            accepted = False
            try:
                mark = self._copier.mark(stream)
                for ticket, is_load, pieces in outlines:
                    self._copier.submit(self._batches.batch(ticket, is_load, pieces, mark))
                    accepted = True
                    self._accept(ticket, is_load, pieces)
            except CudaError as error:
                if not accepted:
                    for ticket, *_ in outlines:
                        self._tickets.end(ticket, False)
                    raise
                ticket, is_load, pieces = outlines[-1]
                self._accept(ticket, is_load, pieces)
                self._end(ticket, error)

    def _accept(self, ticket: int, is_load: bool, pieces: npt.NDArray[np.uint64]) -> None:
        num_pairs = int(pieces[:, 5].sum()) // len(self._gpu.fragments)
        self._open[ticket] = (is_load, num_pairs)
        self._counters["num_tickets"] += 1
        self._counters["num_pairs"] += num_pairs
        self._counters["num_pieces"] += len(pieces)

    def _end(self, ticket: int, error: CudaError | None) -> None:
        failed = self._tickets.end(ticket, error is None) or []
        is_load, num_pairs = self._open.pop(ticket)
        self._counters["num_finished_tickets"] += 1
        self._counters["num_failed_pairs"] += len(failed)
        if error is None:
            self._counters["load_bytes" if is_load else "store_bytes"] += num_pairs * self._cpu.block_bytes
        else:
            self._last_error = error
        self._ended.append((ticket, failed))

    def wait_layer(self, ticket: int, layer: int, stream: object = None) -> None:
        """Have work that is enqueued from now on wait for the layers of a load up to this one; the host does not wait.

        Args:
            ticket: A load that `poll` and `wait` have not reported yet.
            layer: Index of a tensor of the layout, or of a fragment as it was given.
            stream: The stream that will wait, as in the constructor; None: the compute stream.

        Raises:
            ConfigError: There is no such layer, or the ticket is not open.
            TransferError: The layers will not all come: their ticket will be reported as failed. Or the stream is
                capturing a graph, the device is lost, or the engine is closed.
        """
        self._copier.check_process()
        wave = self._batches.wave_of(layer)
        handle = handle_of(self._stream if stream is None else stream)
        with self._lock:
            if self._closed:
                raise TransferError("the copy engine is closed")
            if ticket not in self._open or not self._open[ticket][0]:
                raise ConfigError("ticket", ticket, "a load whose end was not reported yet")
            self._copier.wait_layer(ticket, wave, handle)

    def poll(self) -> list[tuple[int, list[int]]]:
        """What has finished since the last call of `poll` or `wait`; never waits for a copy.

        Returns:
            Per ticket (ticket, indices of the pairs that did not copy: none or all; `last_error` says why). What is at
            the destination of such a pair is not defined.

        Raises:
            TransferError: This process was forked from the engine's.
        """
        self._copier.check_process()
        with self._lock:
            if not self._closed:
                self._collect()
            ended, self._ended = self._ended, []
        return ended

    def _collect(self) -> None:
        for ticket, error in self._copier.poll():
            self._end(ticket, error)

    def wait(self, timeout_s: float) -> list[tuple[int, list[int]]]:
        """As `poll`, but wait for the first ticket to finish, at most `timeout_s` seconds.

        Once the engine is closed and everything is collected, returns at once.

        Args:
            timeout_s: 0 .. 86400.

        Raises:
            ConfigError: The time is outside its limits.
            TransferError: This process was forked from the engine's.
        """
        end = time.monotonic() + _checked_timeout(timeout_s)
        pause = _FIRST_PAUSE_S
        while not (ended := self.poll()) and not self._closed and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return ended

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse new tickets, wait for the others, at most `timeout_s` seconds, and let go of both memories.

        `poll` still gives the reports. A second call does nothing. Unregistering host memory takes CUDA some time.

        Raises:
            ConfigError: The time is outside 0 .. 86400.
            TransferError: Copies still run. They keep both memories, and `close` may be called again.
        """
        end = time.monotonic() + _checked_timeout(timeout_s)
        try:
            self._copier.check_process()
        except TransferError:
            return  # a forked child has nothing to close
        with self._lock:
            self._accepts = False
        pause = _FIRST_PAUSE_S
        while not self._is_closed_now(end) and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))  # without the lock: others may poll meanwhile
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if not self._closed:
            raise TransferError(f"{len(self._open)} tickets have not finished after {timeout_s} s")

    def _is_closed_now(self, end: float) -> bool:
        """Close if no ticket is open."""
        with self._lock:
            if self._closed:
                return True
            self._collect()
            if self._open:
                return False
            self._last_counts = self._copier.counts()
            self._copier.close(max(_LAST_WAIT_S, end - time.monotonic()))
            self._closed = True
            self._finalizer.detach()
            return True

    def stats(self) -> dict[str, int]:
        """Counters since construction, and gauges of now.

        Counters: `num_tickets` accepted, `num_finished_tickets`, `num_refused_tickets`, `num_pairs` accepted,
        `num_failed_pairs`, `num_pieces` (runs times fragments), `load_bytes` and `store_bytes` copied; calls of CUDA:
        `num_copies`, `num_batch_copies` with `num_batched_rows`, `num_kernels`; `num_replaced_groups`, copies that took
        another path than was asked for.

        Gauges: `queue_depth` (tickets that wait or run), `num_uncollected` (finished, not collected),
        `staging_bytes` (0 where the device had no room), `host_registered` (1, or 0 where CUDA refused).

        Raises:
            TransferError: This process was forked from the engine's.
        """
        self._copier.check_process()
        with self._lock:
            counts = self._last_counts if self._closed else self._copier.counts()
            names = ("num_copies", "num_batch_copies", "num_batched_rows", "num_kernels", "num_replaced_groups")
            return {
                **self._counters,
                **{name: counts[name] for name in names},
                "queue_depth": len(self._open),
                "num_uncollected": len(self._ended),
                "staging_bytes": counts["staging_bytes"],
                "host_registered": int(self._copier.is_registered),
            }

    def __enter__(self) -> CudaCopyEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # The exception that is under way says more than that copies are; they keep both memories.
        with contextlib.suppress(TransferError):
            self.close(0.0)

    def __repr__(self) -> str:
        return f"CudaCopyEngine(gpu={self._gpu!r}, cpu={self._cpu!r})"


def _checked_timeout(timeout_s: float) -> float:
    if not 0.0 <= float(timeout_s) <= _MAX_TIMEOUT_S:
        raise ConfigError("timeout_s", timeout_s, f"0 .. {_MAX_TIMEOUT_S} seconds")
    return float(timeout_s)
