"""A worker's side: the copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.connectors.vllm.metadata import Acknowledgements, StepPlan
from kvtier.copy import CopyEngine
from kvtier.errors import ConfigError, TransferError
from kvtier.memory import HostMemory, MemoryLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["WorkerSide", "describe"]

_IDLE_WAIT_S = 0.002


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

    Raises:
        ConfigError: The tensors cannot be copied, or the memory does not fit.
    """

    def __init__(
        self, tensors: Iterable[Any], num_cpu_blocks: int, block_bytes: int, copy_threads: int, rank: int
    ) -> None:
        layout = describe(tensors)
        if layout.block_bytes > block_bytes:
            raise ConfigError("kv_caches", f"{layout.block_bytes} bytes per block", f"at most {block_bytes}")
        self.engine = CopyEngine(layout, HostMemory(num_cpu_blocks, layout.block_bytes), copy_threads, 2**16)
        self._rank = rank
        self._loads: dict[int, tuple[str, list[int]]] = {}
        self._open_pairs: dict[int, int] = {}
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._acknowledgements = Acknowledgements()
        self.death: str | None = None

    def begin_loads(self, plan: StepPlan) -> None:
        """Queue the loads of a step; their destinations are not read before they are reported."""
        for load in plan.loads:
            destinations = load.pairs[:, 1].tolist()
            if load.ticket is None:
                self._bad_blocks.update(destinations)
                self._received.add(load.request_id)
                continue
            self._loads[load.ticket] = (load.request_id, destinations)
            self._submit(load.ticket, "load", load.pairs)

    def begin_stores(self, plan: StepPlan) -> None:
        """Queue the stores of a step that has written their sources."""
        if plan.store_ticket is not None:
            self._submit(plan.store_ticket, "store", plan.stores)

    def _submit(self, ticket: int, direction: Any, pairs: Any) -> None:
        self._open_pairs[ticket] = len(pairs)
        if self.death is None:
            try:
                self.engine.submit_pairs(ticket, direction, pairs)
                return
            except TransferError as error:
                self._die(error)
        self._finish(ticket, list(range(len(pairs))))

    def _die(self, error: TransferError) -> None:
        """No second tier any more: the threads end, so that nothing is written, and whatever is open has failed."""
        self.death = str(error)
        self._acknowledgements.dead_ranks.append(self._rank)
        self.engine.close(0.0)
        self._collect(self.engine.poll())

    def _finish(self, ticket: int, failed: list[int]) -> None:
        if self._open_pairs.pop(ticket, None) is None:
            return
        self._acknowledgements.finished.append((ticket, self._rank, failed))
        if ticket in self._loads:
            request_id, destinations = self._loads.pop(ticket)
            self._received.add(request_id)
            self._bad_blocks.update(destinations[index] for index in failed)

    def _collect(self, reports: list[tuple[int, list[int]]]) -> None:
        for ticket, failed in reports:
            self._finish(ticket, failed)

    def collect(self, is_idle: bool) -> set[str]:
        """Requests whose loads have ended since the last call."""
        if self.death is None and self._open_pairs:
            self._collect(self.engine.wait(_IDLE_WAIT_S) if is_idle else self.engine.poll())
            if self.engine.stats()["num_panics"]:
                self._die(TransferError("a copy thread has panicked"))
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """Gpu blocks whose loads have failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_acknowledgements(self) -> Acknowledgements | None:
        """Tickets finished since the last call; None if there are none."""
        taken, self._acknowledgements = self._acknowledgements, Acknowledgements()
        return taken if taken.finished or taken.dead_ranks else None

    def close(self) -> None:
        """End the threads, without waiting for queued copies, and give the memory back."""
        self.engine.close(0.0)
