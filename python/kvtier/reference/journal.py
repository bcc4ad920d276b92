"""What a table tells about itself: counters and events."""

from __future__ import annotations

from typing import Literal

from kvtier.reference.results import Event
from kvtier.reference.tier import TierName

MAX_WAITING_EVENTS = 65_536
COUNTERS = (
    "num_admitted",
    "num_refused",
    "num_released",
    "num_aborted",
    "num_preempted",
    "num_resets",
    "num_stale_completions",
    "prompt_tokens",
    "gpu_hit_blocks",
    "cpu_hit_blocks",
    "gpu_hit_tokens",
    "cpu_hit_tokens",
    "fresh_blocks",
    "loads_planned_blocks",
    "loaded_blocks",
    "load_failed_blocks",
    "loads_cancelled_blocks",
    "stores_planned_blocks",
    "stored_blocks",
    "store_failed_blocks",
    "stores_deferred_budget_blocks",
    "stores_deferred_no_cpu_slot_blocks",
    "stores_lost_blocks",
    "gpu_evicted_blocks",
    "cpu_evicted_blocks",
    "cpu_withdrawn_blocks",
    "events_dropped",
)


class Journal:
    """Counters since construction, and the events that wait to be drained."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._events: list[Event] = []

    def count(self, counter: str, amount: int = 1) -> None:
        """Move a counter up."""
        self.counters[counter] += amount

    def record(self, kind: Literal["stored", "removed"], tier: TierName, block_hash: bytes, block_id: int) -> None:
        """Note an event; beyond the most that may wait, it is lost."""
        if len(self._events) == MAX_WAITING_EVENTS:
            self.count("events_dropped")
            return
        self._events.append(Event(kind, tier, block_hash, block_id))

    def drain(self) -> list[Event]:
        """The events since the last call, in order."""
        drained, self._events = self._events, []
        return drained
