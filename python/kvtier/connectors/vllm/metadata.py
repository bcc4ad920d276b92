"""What crosses between the scheduler's and the workers' processes: integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Acknowledgements", "Load", "StepPlan"]


@dataclass
class Load:
    """The load of one request.

    Attributes:
        request_id: Who waits for it.
        ticket: Its ticket; None if its blocks were lost before it began.
        pairs: Rows (Cpu block id, Gpu block id): shape (n, 2), int32. Without a ticket the first column means nothing.
    """

    request_id: str
    ticket: int | None
    pairs: npt.NDArray[np.int32]


@dataclass
class StepPlan(KVConnectorMetadata):
    """The copies that begin with one step.

    Attributes:
        loads: Loads, one ticket each.
        store_ticket: Ticket of the stores; None if there are none.
        stores: Rows (Gpu block id, Cpu block id): shape (n, 2), int32.
        is_idle: Whether the step computes nothing, so that waiting a moment for a copy costs nobody anything.
    """

    loads: list[Load] = field(default_factory=list)
    store_ticket: int | None = None
    stores: npt.NDArray[np.int32] | None = None
    is_idle: bool = False


@dataclass
class Acknowledgements(KVConnectorWorkerMetadata):
    """Tickets that ranks have finished.

    Attributes:
        finished: (ticket, rank, indices of the pairs that failed there).
        dead_ranks: Ranks whose copy engine has stopped for good.
    """

    finished: list[tuple[int, int, list[int]]] = field(default_factory=list)
    dead_ranks: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Acknowledgements:
        """Join those of two ranks."""
        assert isinstance(other, Acknowledgements)
        return Acknowledgements(self.finished + other.finished, self.dead_ranks + other.dead_ranks)
