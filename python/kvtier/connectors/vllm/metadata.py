"""What crosses between the scheduler's and the workers' processes: numbers only.

Without vLLM, so that either side can be tested alone; `connector.py` makes vLLM take them for its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Acknowledgements", "Copied", "Load", "StepPlan"]


@dataclass
class Load:
    """The load of one request.

    Attributes:
        request_id: Who waits for it.
        ticket: Its ticket; None if its blocks were lost before it began.
        pairs: Rows (Cpu block id, Gpu block id): shape (n, 2), int32. Without a ticket the first column means nothing.
        is_same_step: Whether the request is part of the step, so that the step waits for the load.
    """

    request_id: str
    ticket: int | None
    pairs: npt.NDArray[np.int32]
    is_same_step: bool = False


@dataclass
class StepPlan:
    """The copies that begin with one step.

    Attributes:
        step: Number of the step, counted from 1.
        known_step: Last step whose outcome was known when this one was planned; 0: none.
        loads: Loads, one ticket each.
        store_ticket: Ticket of the stores; None if there are none.
        stores: Rows (Gpu block id, Cpu block id): shape (n, 2), int32.
        is_idle: Whether the step computes nothing, so that waiting a moment for a copy costs nobody anything.
    """

    step: int = 0
    known_step: int = 0
    loads: list[Load] = field(default_factory=list)
    store_ticket: int | None = None
    stores: npt.NDArray[np.int32] | None = None
    is_idle: bool = False


@dataclass
class Copied:
    """Bytes copied and the time that the copy threads of all ranks took for it, since the last report.

    Attributes:
        load_bytes: Bytes loaded.
        load_seconds: Seconds of copy threads.
        store_bytes: Bytes stored.
        store_seconds: Seconds of copy threads.
    """

    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0

    def __add__(self, other: Copied) -> Copied:
        return Copied(
            self.load_bytes + other.load_bytes,
            self.load_seconds + other.load_seconds,
            self.store_bytes + other.store_bytes,
            self.store_seconds + other.store_seconds,
        )


@dataclass
class Acknowledgements:
    """What ranks have to say after a step.

    Attributes:
        step: Number of the step.
        finished: (ticket, rank, indices of the pairs that failed there).
        dead_ranks: Ranks whose copy engine has stopped for good.
        copied: What was copied.
        queue_depth: Tickets that wait or run, of all ranks.
    """

    step: int = 0
    finished: list[tuple[int, int, list[int]]] = field(default_factory=list)
    dead_ranks: list[int] = field(default_factory=list)
    copied: Copied = field(default_factory=Copied)
    queue_depth: int = 0

    def aggregate(self, other: Acknowledgements) -> Acknowledgements:
        """Join those of two ranks."""
        return Acknowledgements(
            max(self.step, other.step),
            self.finished + other.finished,
            self.dead_ranks + other.dead_ranks,
            self.copied + other.copied,
            self.queue_depth + other.queue_depth,
        )
