"""One tier: a pool of equal block slots, an index of the published ones, and the order in which to evict them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

TierName = Literal["gpu", "cpu"]


class State(Enum):
    """What a slot is; each slot is exactly one of these."""

    FREE = "free"
    CLAIMED = "claimed"
    CACHED = "cached"
    IN_FLIGHT = "in_flight"


@dataclass
class Slot:
    """A slot; `holds` forbid eviction, `block_hash` is set while the slot is cached."""

    state: State = State.FREE
    holds: int = 0
    block_hash: bytes = b""


class Tier:
    """A pool of slots.

    Args:
        name: `"gpu"` or `"cpu"`.
        num_blocks: Slots.
        on_change: Told of every published and removed block: ("stored" or "removed", tier, hash, id).
        on_evict: Told of every evicted block, after `on_change`.
    """

    def __init__(
        self,
        name: TierName,
        num_blocks: int,
        on_change: Callable[[Literal["stored", "removed"], TierName, bytes, int], None],
        on_evict: Callable[[int], None],
    ) -> None:
        self.name = name
        self.slots = [Slot() for _ in range(num_blocks)]
        self.free = list(range(num_blocks))
        """A heap: the lowest free id comes first."""
        self.index: dict[bytes, int] = {}
        self.eviction_order: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody holds; the old end comes first."""
        self._on_change = on_change
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Slots that are free or evictable."""
        return len(self.free) + len(self.eviction_order)

    def allocate(self, count: int, state: State) -> list[int]:
        """Take `count` slots, ids ascending: the lowest free ones, then by eviction. There must be that many."""
        block_ids = [heapq.heappop(self.free) for _ in range(min(count, len(self.free)))]
        while len(block_ids) < count:
            block_ids.append(self._evict_oldest())
        for block_id in block_ids:
            self.assign(block_id, state)
        return sorted(block_ids)

    def _evict_oldest(self) -> int:
        block_id, _ = self.eviction_order.popitem(last=False)
        self._unpublish(block_id)
        self._on_evict(block_id)
        return block_id

    def assign(self, block_id: int, state: State) -> None:
        """Give an allocated or landed slot to its new owner; a claimed slot has its owner's hold."""
        slot = self.slots[block_id]
        slot.state = state
        slot.holds = 1 if state is State.CLAIMED else 0

    def hold(self, block_id: int) -> None:
        """Forbid the eviction of a cached block once more."""
        self.slots[block_id].holds += 1
        self.eviction_order.pop(block_id, None)

    def drop(self, block_id: int) -> None:
        """Take one hold back. At zero a cached block becomes evictable, a claimed slot free."""
        slot = self.slots[block_id]
        slot.holds -= 1
        if slot.holds == 0:
            if slot.state is State.CACHED:
                self.eviction_order[block_id] = None
            else:
                self.make_free(block_id)

    def refresh(self, block_id: int) -> None:
        """Move a block that nobody holds to the young end."""
        if block_id in self.eviction_order:
            self.eviction_order.move_to_end(block_id)

    def publish(self, block_id: int, block_hash: bytes, holds: int) -> None:
        """Make a block a hit under its hash."""
        slot = self.slots[block_id]
        slot.state, slot.holds, slot.block_hash = State.CACHED, holds, block_hash
        self.index[block_hash] = block_id
        if holds == 0:
            self.eviction_order[block_id] = None
        self._on_change("stored", self.name, block_hash, block_id)

    def withdraw(self, block_id: int) -> None:
        """A held block is no longer a hit; its slot is free when its last hold goes."""
        self._unpublish(block_id)
        self.slots[block_id].state = State.CLAIMED

    def _unpublish(self, block_id: int) -> None:
        slot = self.slots[block_id]
        block_hash, slot.block_hash = slot.block_hash, b""
        del self.index[block_hash]
        self._on_change("removed", self.name, block_hash, block_id)

    def make_free(self, block_id: int) -> None:
        """Give a slot back that is not cached."""
        slot = self.slots[block_id]
        slot.state, slot.holds = State.FREE, 0
        heapq.heappush(self.free, block_id)

    def clear(self) -> None:
        """Forget every cached block, ids ascending; nobody may hold one."""
        for block_id in sorted(self.index.values()):
            del self.eviction_order[block_id]
            self._unpublish(block_id)
            self.make_free(block_id)

    def gauges(self) -> dict[str, int]:
        """Counts of slots by state, by name of the statistic."""
        states = [slot.state for slot in self.slots]
        counts = {f"{self.name}_blocks": len(self.slots)}
        for state in State:
            counts[f"{self.name}_{state.value}_blocks"] = states.count(state)
        counts[f"{self.name}_held_blocks"] = sum(slot.holds > 0 for slot in self.slots)
        counts[f"{self.name}_evictable_blocks"] = len(self.eviction_order)
        return counts
