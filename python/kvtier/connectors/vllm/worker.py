"""A worker's side: the copies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.metadata import Acknowledgements, Copied, Load, StepPlan
from kvtier.copy import CopyEngine
from kvtier.errors import ConfigError, TransferError
from kvtier.memory import HostMemory, MemoryLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["WorkerSide", "describe"]

_IDLE_WAIT_S = 0.002
_COPY_TIMEOUT_S = 30.0
"""If no copy ends for longer, the copy engine is taken for dead: queued ones may wait while others go on."""
_LOST_TIMEOUT_S = 300.0
"""A copy that takes longer is taken for lost, whatever others do."""


def describe(tensors: Iterable[Any]) -> MemoryLayout:
    """Describe vLLM's KV tensors, each region once.

    Args:
        tensors: One per layer, blocks first.

    Raises:
        ConfigError: A tensor is not in host memory, or its blocks are not contiguous.
    """
    distinct: dict[Any, Any] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            limit = "cpu: KvtierConnector copies with the processor so far; it cannot reach this device's memory"
            raise ConfigError(f"kv_caches[{index}].device", tensor.device, limit)
        distinct.setdefault((tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())), tensor)
    return MemoryLayout.from_tensors(list(distinct.values()))


class WorkerSide:
    """Host memory and copy engine of one worker.

    Args:
        tensors: vLLM's KV tensors, one per layer.
        num_cpu_blocks: Slots of the Cpu tier.
        block_bytes: Bytes of a block, as the scheduler's side has computed them.
        copy_threads: Threads that copy.
        rank: This worker's rank.
        clock: Seconds, growing.

    Raises:
        ConfigError: The tensors cannot be copied, or the memory does not fit.
    """

    def __init__(
        self,
        tensors: Iterable[Any],
        num_cpu_blocks: int,
        block_bytes: int,
        copy_threads: int,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = describe(tensors)
        if layout.block_bytes > block_bytes:
            raise ConfigError("kv_caches", f"{layout.block_bytes} bytes per block", f"at most {block_bytes}")
        self.engine = CopyEngine(layout, HostMemory(num_cpu_blocks, layout.block_bytes), copy_threads, 2**16)
        self._rank = rank
        self._clock = clock
        self._loads: dict[int, tuple[Load, list[int]]] = {}
        # Number of pairs and time of submission, oldest first.
        self._open: dict[int, tuple[int, float]] = {}
        self._last_end = float("-inf")
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._acknowledgements = Acknowledgements()
        self._step = 0
        self._spoilt_step = 0
        self._last_copied = Copied()
        self.death: str | None = None

    def begin_loads(self, plan: StepPlan) -> None:
        """Queue the loads of a step, and wait for those that the step itself needs.

        The destinations of the others are not read before they are reported.
        """
        self._step = plan.step
        needed = [load for load in plan.loads if load.is_same_step]
        for load in needed:
            self._begin_load(load)
        # What the step needs goes first, and the others meanwhile.
        for load in plan.loads:
            if not load.is_same_step:
                self._begin_load(load)
        self._wait([load.ticket for load in needed if load.ticket is not None])

    def _begin_load(self, load: Load) -> None:
        destinations = load.pairs[:, 1].tolist()
        if load.ticket is None:
            self._fail(load, destinations)
            return
        self._loads[load.ticket] = (load, destinations)
        self._submit(load.ticket, "load", load.pairs)

    def _fail(self, load: Load, destinations: Iterable[int]) -> None:
        """A load has ended, with these destinations bad."""
        bad = set(destinations)
        self._bad_blocks |= bad
        if not load.is_same_step:
            self._received.add(load.request_id)
        elif bad:
            self._spoilt_step = self._step

    def _wait(self, tickets: list[int]) -> None:
        while self.death is None and any(ticket in self._open for ticket in tickets):
            self._collect(self.engine.wait(0.05))
            self._check_alive()

    def begin_stores(self, plan: StepPlan) -> None:
        """Queue the stores of a step that has written their sources.

        Where a load failed within a step, what was computed on top of it is wrong: it is not stored, nor what steps
        wrote that were planned before the scheduler knew.
        """
        self._step = plan.step
        if plan.store_ticket is None or plan.stores is None:
            return
        if plan.known_step < self._spoilt_step:
            self._acknowledgements.finished.append((plan.store_ticket, self._rank, list(range(len(plan.stores)))))
            return
        self._submit(plan.store_ticket, "store", plan.stores)

    def _submit(self, ticket: int, direction: Any, pairs: Any) -> None:
        self._open[ticket] = (len(pairs), self._clock())
        if self.death is None:
            try:
                self.engine.submit_pairs(ticket, direction, pairs)
                return
            except TransferError as error:
                self._die(str(error))
        self._finish(ticket, list(range(len(pairs))))

    def _check_alive(self) -> None:
        """End the second tier if a copy is lost: nobody must wait for it for ever."""
        if self.death is not None or not self._open:
            return
        if self.engine.stats()["num_panics"]:
            self._die("a copy thread has panicked")
            return
        ticket, (_, since) = next(iter(self._open.items()))
        now = self._clock()
        if now - max(since, self._last_end) > _COPY_TIMEOUT_S:
            self._die(f"ticket {ticket} was not copied within {_COPY_TIMEOUT_S:g} s")
        elif now - since > _LOST_TIMEOUT_S:
            self._die(f"ticket {ticket} was not copied within {_LOST_TIMEOUT_S:g} s, though others were")

    def _die(self, reason: str) -> None:
        """No second tier any more: the threads end, so that nothing is written, and whatever is open has failed.

        Raises:
            TransferError: A thread does not end, and may still write to blocks that vLLM would compute instead.
        """
        self.death = reason
        self._acknowledgements.dead_ranks.append(self._rank)
        try:
            self.engine.close(0.0)
        except TransferError as error:
            # A thread that hangs in a store only reads vLLM's blocks, and nobody reads the host memory any more.
            if any(ticket in self._loads for ticket in self._open):
                raise TransferError(f"{reason}; a load may still write to KV blocks: {error}") from error
        self._collect(self.engine.poll())
        for ticket, (num_pairs, _) in list(self._open.items()):
            self._finish(ticket, list(range(num_pairs)))

    def _finish(self, ticket: int, failed: list[int]) -> None:
        if self._open.pop(ticket, None) is None:
            return
        self._acknowledgements.finished.append((ticket, self._rank, failed))
        if ticket in self._loads:
            load, destinations = self._loads.pop(ticket)
            self._fail(load, [destinations[index] for index in failed])

    def _collect(self, reports: list[tuple[int, list[int]]]) -> None:
        if reports:
            self._last_end = self._clock()
        for ticket, failed in reports:
            self._finish(ticket, failed)

    def collect(self, is_idle: bool) -> set[str]:
        """Requests whose loads have ended since the last call."""
        if self.death is None and self._open:
            self._collect(self.engine.wait(_IDLE_WAIT_S) if is_idle else self.engine.poll())
            self._check_alive()
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """Gpu blocks whose loads have failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_acknowledgements(self) -> Acknowledgements:
        """What there is to say after a step; the number of the step at least."""
        taken, self._acknowledgements = self._acknowledgements, Acknowledgements()
        taken.step = self._step
        if taken.finished and self.death is None:
            stats = self.engine.stats()
            now = Copied(
                int(stats["load_bytes"]), stats["load_seconds"], int(stats["store_bytes"]), stats["store_seconds"]
            )
            before, self._last_copied = self._last_copied, now
            taken.copied = Copied(
                now.load_bytes - before.load_bytes,
                now.load_seconds - before.load_seconds,
                now.store_bytes - before.store_bytes,
                now.store_seconds - before.store_seconds,
            )
        taken.queue_depth = len(self._open)
        return taken

    def close(self) -> None:
        """End the threads, without waiting for queued copies, and give the memory back."""
        self.engine.close(0.0)
