"""The invariants of a table, recounted from what requests, planned loads and tickets own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtier.errors import InvariantError
from kvtier.reference.tier import State, Tier

if TYPE_CHECKING:
    from kvtier.reference.blocks import Blocks


def audit(blocks: Blocks) -> None:
    """Prove that every slot is what its owners say it is.

    Raises:
        InvariantError: One is not; the text names the invariant and the slot.
    """
    loads = list(blocks.planned_loads)
    stores = []
    for ticket in blocks.tickets.values():
        loads += ticket.loads
        stores += ticket.stores
    landing = Counter(load.destination for load in loads)
    gpu_holds = Counter(store.source for store in stores)
    for request in blocks.requests.values():
        # A destination that is still in flight has its load for an owner.
        own = {load.destination for load in loads if load.request is request}
        gpu_holds.update(block_id for block_id in request.block_ids if block_id not in own)
    _audit_tier(blocks.gpu, gpu_holds, landing)
    _audit_tier(blocks.cpu, Counter(load.source for load in loads), Counter(store.destination for store in stores))

    _require(blocks.receiving == {store.block_hash for store in stores}, "cpu: receiving is what the tickets store")
    for block_id in blocks.store_queue:
        block_hash = blocks.gpu.slots[block_id].block_hash
        _require(blocks.gpu.index.get(block_hash) == block_id, f"gpu slot {block_id}: in the store queue, not cached")
        known = block_hash in blocks.cpu.index or block_hash in blocks.receiving
        _require(not known, f"gpu slot {block_id}: in the store queue, yet the Cpu tier has it")


def _audit_tier(tier: Tier, holds: Counter[int], destinations: Counter[int]) -> None:
    name = tier.name
    _require(_distinct(tier.free), f"{name}: a slot is free twice")
    free, idle = set(tier.free), set(tier.eviction_order)
    index = {block_id: block_hash for block_hash, block_id in tier.index.items()}
    _require(len(index) == len(tier.index), f"{name}: two hashes name one slot")
    for block_id, slot in enumerate(tier.slots):
        here = f"{name} slot {block_id} ({slot.state.value}, {slot.holds} holds)"
        _require((slot.state is State.FREE) == (block_id in free), f"{here}: free and in the free slots go together")
        _require((slot.state is State.CACHED) == (block_id in index), f"{here}: cached and in the index go together")
        _require(slot.block_hash == index.get(block_id, b""), f"{here}: the hash is that of the index")
        evictable = slot.state is State.CACHED and slot.holds == 0
        _require(evictable == (block_id in idle), f"{here}: evictable and in the eviction order go together")
        _require(slot.holds == holds[block_id], f"{here}: {holds[block_id]} holds have an owner")
        in_flight = int(slot.state is State.IN_FLIGHT)
        _require(destinations[block_id] == in_flight, f"{here}: destination of {destinations[block_id]} copies")
        _require(slot.state is not State.CLAIMED or slot.holds > 0, f"{here}: claimed by nobody")
        _require(name == "cpu" or slot.state is not State.CLAIMED or slot.holds == 1, f"{here}: claimed and shared")


def _distinct(block_ids: Iterable[int]) -> bool:
    return all(count == 1 for count in Counter(block_ids).values())


def _require(holds_true: bool, invariant: str) -> None:
    if not holds_true:
        raise InvariantError(f"broken: {invariant}")
