"""The oracle's own book of who owns which slot, kept from what the table answered and never from its insides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from expected_hashes import Identity

Pair = tuple[int, int]
Slot = tuple[str, int]
"""(tier, block id)."""


@dataclass(eq=False)
class LiveRequest:
    """What the oracle knows of a request."""

    request_id: str | int
    block_size: int
    num_tokens: int
    hashes: list[bytes]
    prints: list[Hashable]
    ids: list[int]
    gpu_hits: int
    sources: list[int]
    """Cpu blocks that its loads come from."""
    tokens: list[int] | None
    """None if its hashes were given."""
    identity: Identity
    valid_tokens: int = 0
    remembered: int = 0
    loads: Literal["none", "planned", "running"] = "none"
    live: bool = True

    @property
    def cached_blocks(self) -> int:
        return self.gpu_hits + len(self.sources)

    @property
    def handled(self) -> int:
        """Leading blocks that are known to be written."""
        return self.valid_tokens // self.block_size

    @property
    def load_positions(self) -> range:
        return range(self.gpu_hits, self.cached_blocks)

    @property
    def landing(self) -> set[int]:
        """Gpu blocks that its unfinished loads will write."""
        return set() if self.loads == "none" else {self.ids[position] for position in self.load_positions}


@dataclass(eq=False)
class OpenTicket:
    """Copies that were planned and not yet acknowledged by every rank."""

    kind: Literal["load", "store"]
    pairs: list[Pair]
    hashes: list[bytes]
    owners: list[tuple[LiveRequest, int]] = field(default_factory=list)
    """Of loads: the request and the position of the block in it."""
    acknowledged: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    @property
    def source_tier(self) -> str:
        return "cpu" if self.kind == "load" else "gpu"

    @property
    def destination_tier(self) -> str:
        return "gpu" if self.kind == "load" else "cpu"


class Ownership:
    """Requests, tickets, and the published blocks of both tiers as the events told of them."""

    def __init__(self, gpu_blocks: int, cpu_blocks: int) -> None:
        self.sizes = {"gpu": gpu_blocks, "cpu": cpu_blocks}
        self.requests: dict[str | int, LiveRequest] = {}
        self.planned: list[LiveRequest] = []
        """Requests whose loads the next step must list, in order of admission."""
        self.tickets: dict[int, OpenTicket] = {}
        self.last_ticket = 0
        self.published: dict[str, dict[bytes, int]] = {"gpu": {}, "cpu": {}}
        self.hash_at: dict[Slot, bytes] = {}
        self.to_store: set[int] = set()
        """Published Gpu blocks that wait to be stored."""

    def find(self, hashes: list[bytes]) -> tuple[list[int], list[int]]:
        """Ids of the leading blocks in the Gpu tier, then of those in the Cpu tier."""
        gpu, cpu = self.published["gpu"], self.published["cpu"]
        num_gpu = next((i for i, name in enumerate(hashes) if name not in gpu), len(hashes))
        rest = hashes[num_gpu:]
        num_cpu = next((i for i, name in enumerate(rest) if name not in cpu), len(rest))
        return [gpu[name] for name in hashes[:num_gpu]], [cpu[name] for name in rest[:num_cpu]]

    def ticket_slots(self) -> Iterator[tuple[Slot, Slot]]:
        """Source and destination of every copy that runs."""
        for ticket in self.tickets.values():
            for source, destination in ticket.pairs:
                yield (ticket.source_tier, source), (ticket.destination_tier, destination)

    def receiving(self) -> set[bytes]:
        """Hashes on their way into the Cpu tier."""
        return {name for ticket in self.tickets.values() if ticket.kind == "store" for name in ticket.hashes}

    def held(self) -> Counter[Slot]:
        """Holds on each slot: those of requests on their blocks, and of loads and stores on their sources."""
        holds: Counter[Slot] = Counter()
        for request in self.requests.values():
            landing = request.landing
            holds.update(("gpu", block_id) for block_id in request.ids if block_id not in landing)
        for request in self.planned:
            holds.update(("cpu", source) for source in request.sources)
        holds.update(source for source, _ in self.ticket_slots())
        return holds

    def destinations(self) -> Counter[Slot]:
        """Slots that planned or running copies will write."""
        slots = Counter(destination for _, destination in self.ticket_slots())
        slots.update(("gpu", block_id) for request in self.planned for block_id in request.landing)
        return slots

    def gauges(self) -> dict[str, int]:
        """What `stats()` must say of slots, requests and tickets."""
        holds, destinations = self.held(), self.destinations()
        expected = {"num_requests": len(self.requests), "num_tickets": len(self.tickets)}
        expected["store_queue_blocks"] = len(self.to_store)
        for tier, size in self.sizes.items():
            held = {block_id for name, block_id in holds if name == tier}
            cached = set(self.published[tier].values())
            landing = {block_id for name, block_id in destinations if name == tier}
            counts = {
                "blocks": size,
                "cached_blocks": len(cached),
                "in_flight_blocks": len(landing),
                "claimed_blocks": len(held - cached),
                "free_blocks": size - len(cached | landing | held),
                "held_blocks": len(held),
                "evictable_blocks": len(cached - held),
            }
            expected |= {f"{tier}_{name}": value for name, value in counts.items()}
        return expected

    def check_exclusive(self) -> None:
        """No slot has two owners who may not share it."""
        holds, destinations = self.held(), self.destinations()
        for slot, times in destinations.items():
            assert times == 1, f"O6: {slot} is the destination of {times} copies"
            assert slot not in holds, f"O6: {slot} is a destination and held by somebody at once"
            assert slot not in self.hash_at, f"O6: {slot} is a destination and published at once"
        users: dict[int, set[bytes | None]] = {}
        for request in self.requests.values():
            for position, block_id in enumerate(request.ids):
                full = position < len(request.hashes) and position < request.handled
                users.setdefault(block_id, set()).add(request.hashes[position] if full else None)
        shared = Counter(block_id for request in self.requests.values() for block_id in request.ids)
        for block_id, times in shared.items():
            if times > 1:
                published = self.hash_at.get(("gpu", block_id))
                assert users[block_id] == {published}, f"O6: gpu block {block_id} is shared while it may be written"

    def publish(self, tier: str, name: bytes, block_id: int) -> None:
        """A block became a hit."""
        assert name not in self.published[tier], f"{tier} block {block_id}: its hash is published twice"
        assert (tier, block_id) not in self.hash_at, f"{tier} block {block_id}: published under two hashes"
        self.published[tier][name] = block_id
        self.hash_at[tier, block_id] = name
        in_cpu_tier = name in self.published["cpu"] or name in self.receiving()
        if tier == "gpu" and self.sizes["cpu"] and not in_cpu_tier:
            self.to_store.add(block_id)

    def remove(self, tier: str, name: bytes, block_id: int) -> None:
        """A block ceased to be a hit."""
        assert self.published[tier].get(name) == block_id, f"{tier} block {block_id}: removed, but was no hit"
        del self.published[tier][name], self.hash_at[tier, block_id]
        if tier == "gpu":
            self.to_store.discard(block_id)
