"""The life of a block: every decision about slots, holds, copies and evictions (docs/design.md, section Decisions)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvtier.errors import OutOfBlocksError
from kvtier.reference.hashing import Chain
from kvtier.reference.journal import Journal
from kvtier.reference.request import Load, Request, Step, Store, Ticket
from kvtier.reference.tier import State, Tier


class Blocks:
    """Two tiers, the requests that own blocks in them, and the copies between them.

    Arguments are taken as checked and hashes as computed; `ReferenceBlockTable` does both.
    """

    def __init__(
        self, gpu_blocks: int, cpu_blocks: int, block_size: int, max_store_blocks: int | None, ranks: int
    ) -> None:
        self.block_size = block_size
        self.max_store_blocks = math.inf if max_store_blocks is None else max_store_blocks
        self.ranks = ranks
        self.journal = Journal()
        self.gpu = Tier("gpu", gpu_blocks, self.journal.record, self._gpu_evicted)
        self.cpu = Tier("cpu", cpu_blocks, self.journal.record, self._cpu_evicted)
        self.requests: dict[str | int, Request] = {}
        self.planned_loads: list[Load] = []
        self.store_queue: OrderedDict[int, None] = OrderedDict()
        """Cached Gpu blocks that wait for a copy in the Cpu tier, oldest first."""
        self.receiving: set[bytes] = set()
        """Hashes of the blocks on their way into the Cpu tier."""
        self.tickets: dict[int, Ticket] = {}
        self.last_ticket = 0

    # Admission

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Leading blocks in the Gpu tier, then blocks in the Cpu tier; a block in neither ends the prefix."""
        gpu_hits = 0
        while gpu_hits < len(hashes) and hashes[gpu_hits] in self.gpu.index:
            gpu_hits += 1
        cpu_hits = 0
        while gpu_hits + cpu_hits < len(hashes) and hashes[gpu_hits + cpu_hits] in self.cpu.index:
            cpu_hits += 1
        return gpu_hits, cpu_hits

    def usable(self, hashes: Sequence[bytes], num_tokens: int) -> Sequence[bytes]:
        """The blocks that may hit: one token is always left to compute."""
        return hashes[: max(num_tokens - 1, 0) // self.block_size]

    def admit(self, request_id: str | int, num_tokens: int, chain: Chain, hashes: list[bytes]) -> Request:
        """Hold the longest usable prefix and reserve Gpu blocks for all tokens; or change nothing."""
        usable = self.usable(hashes, num_tokens)
        gpu_hits, cpu_hits = self.find(usable)
        gpu_ids = [self.gpu.index[block_hash] for block_hash in usable[:gpu_hits]]
        cpu_ids = [self.cpu.index[block_hash] for block_hash in usable[gpu_hits : gpu_hits + cpu_hits]]
        needed = self._num_blocks(num_tokens) - gpu_hits
        # A set: given hashes may name one block twice, which costs only one evictable block.
        hits_evictable = {block_id for block_id in gpu_ids if block_id in self.gpu.eviction_order}
        self._require(needed, self.gpu.num_available - len(hits_evictable))

        for block_id in gpu_ids:
            self.gpu.hold(block_id)
        for block_id in cpu_ids:
            self.cpu.hold(block_id)
        block_ids = gpu_ids + self.gpu.allocate(needed, State.CLAIMED)
        request = Request(request_id, num_tokens, chain, hashes, block_ids, gpu_hits, cpu_hits)
        request.valid_tokens = gpu_hits * self.block_size
        request.ready = cpu_hits == 0
        self.requests[request_id] = request
        for position, source in enumerate(cpu_ids, start=gpu_hits):
            self.gpu.assign(block_ids[position], State.IN_FLIGHT)
            self.planned_loads.append(Load(request, position, hashes[position], source, block_ids[position]))

        self.journal.count("num_admitted")
        self.journal.count("prompt_tokens", num_tokens)
        self.journal.count("gpu_hit_blocks", gpu_hits)
        self.journal.count("cpu_hit_blocks", cpu_hits)
        self.journal.count("gpu_hit_tokens", gpu_hits * self.block_size)
        self.journal.count("cpu_hit_tokens", cpu_hits * self.block_size)
        self.journal.count("fresh_blocks", needed - cpu_hits)
        return request

    def extend(self, request: Request, num_tokens: int, chain: Chain, hashes: list[bytes]) -> list[int]:
        """Add tokens and the hashes of the blocks that they fill; the ids of the blocks added."""
        needed = self._num_blocks(request.num_tokens + num_tokens) - len(request.block_ids)
        self._require(needed, self.gpu.num_available)
        block_ids = self.gpu.allocate(needed, State.CLAIMED)
        request.num_tokens += num_tokens
        request.chain = chain
        request.hashes = request.hashes + hashes
        request.block_ids = request.block_ids + block_ids
        self.journal.count("fresh_blocks", needed)
        return block_ids

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _require(self, needed: int, available: int) -> None:
        if needed > available:
            self.journal.count("num_refused")
            raise OutOfBlocksError(needed, available, len(self.gpu.slots))

    # Commit

    def commit(self, request: Request, num_tokens: int) -> None:
        """The first tokens are written: publish their full blocks, at once or when the loads have finished."""
        if not request.ready:
            request.remembered_commit = max(request.remembered_commit, num_tokens)
            return
        for position in range(self._num_handled(request), num_tokens // self.block_size):
            if request.hashes[position] not in self.gpu.index:
                self._publish_gpu(request.block_ids[position], request.hashes[position], holds=1)
        request.valid_tokens = max(request.valid_tokens, num_tokens)

    def _num_handled(self, request: Request) -> int:
        """Leading blocks that are known to be written: hits that came through, then committed blocks."""
        return request.valid_tokens // self.block_size

    def _publish_gpu(self, block_id: int, block_hash: bytes, holds: int) -> None:
        self.gpu.publish(block_id, block_hash, holds)
        self._offer_to_store(block_id, block_hash)

    def _offer_to_store(self, block_id: int, block_hash: bytes) -> None:
        if self.cpu.slots and block_hash not in self.cpu.index and block_hash not in self.receiving:
            self.store_queue[block_id] = None

    # The end of a request

    def end(self, request: Request) -> None:
        """Take back all that a request owns, and cancel its loads that have not started."""
        del self.requests[request.request_id]
        request.live = False
        cancelled = {load.position: load for load in self.planned_loads if load.request is request}
        self.planned_loads = [load for load in self.planned_loads if load.request is not request]
        self.journal.count("loads_cancelled_blocks", len(cancelled))
        # Tail first: a parent becomes younger than its children and outlives them.
        for position in reversed(range(len(request.block_ids))):
            block_id = request.block_ids[position]
            written = position < self._num_handled(request)
            if position in cancelled:
                self.gpu.make_free(block_id)
                self.cpu.drop(cancelled[position].source)
            elif self.gpu.slots[block_id].state is State.CLAIMED and written:
                self._end_duplicate(block_id, request.hashes[position])
            elif self.gpu.slots[block_id].state is not State.IN_FLIGHT:
                self.gpu.drop(block_id)
            if written and position >= request.gpu_hits:
                copy = self.cpu.index.get(request.hashes[position])
                if copy is not None:
                    self.cpu.refresh(copy)

    def _end_duplicate(self, block_id: int, block_hash: bytes) -> None:
        published = self.gpu.index.get(block_hash)
        if published is None:
            self._publish_gpu(block_id, block_hash, holds=0)
        else:
            self.gpu.make_free(block_id)
            self.gpu.refresh(published)

    # Copies

    def step(self) -> Step:
        """Plan the copies that are due now: all loads, then stores within the budget."""
        loads, self.planned_loads = self.planned_loads, []
        self.journal.count("loads_planned_blocks", len(loads))
        load_ticket = self._open(Ticket(loads=loads)) if loads else None
        stores, not_stored = self._plan_stores()
        store_ticket = self._open(Ticket(stores=stores)) if stores else None
        return Step(loads, load_ticket, stores, store_ticket, not_stored)

    def _open(self, ticket: Ticket) -> int:
        ticket.waiting_ranks = set(range(self.ranks))
        self.last_ticket += 1
        self.tickets[self.last_ticket] = ticket
        return self.last_ticket

    def _plan_stores(self) -> tuple[list[Store], dict[str, int]]:
        cpu_slots = self.cpu.num_available
        count = int(min(len(self.store_queue), self.max_store_blocks, cpu_slots))
        stores: list[Store] = []
        for destination in self.cpu.allocate(count, State.IN_FLIGHT):
            source, _ = self.store_queue.popitem(last=False)
            block_hash = self.gpu.slots[source].block_hash
            self.gpu.hold(source)
            self.receiving.add(block_hash)
            stores.append(Store(block_hash, source, destination))
        self.journal.count("stores_planned_blocks", count)
        left = len(self.store_queue)
        if not left:
            return stores, {}
        reason = "budget" if self.max_store_blocks <= cpu_slots else "no_cpu_slot"
        self.journal.count(f"stores_deferred_{reason}_blocks", left)
        return stores, {reason: left}

    def acknowledge(self, number: int, rank: int, failed: set[int]) -> bool:
        """One rank has copied; True if it was the last one and the ticket is finished."""
        ticket = self.tickets[number]
        ticket.failed |= failed
        ticket.waiting_ranks.remove(rank)
        if ticket.waiting_ranks:
            return False
        del self.tickets[number]
        if ticket.loads:
            self._finish_loads(ticket.loads, ticket.failed)
        else:
            self._finish_stores(ticket.stores, ticket.failed)
        return True

    def _finish_stores(self, stores: list[Store], failed: set[int]) -> None:
        self.receiving.difference_update(store.block_hash for store in stores)
        self.journal.count("store_failed_blocks", len(failed))
        self.journal.count("stored_blocks", len(stores) - len(failed))
        for index in sorted(failed):
            self.cpu.make_free(stores[index].destination)
            self.store_queue[stores[index].source] = None
        for index, store in reversed(list(enumerate(stores))):
            if index not in failed:
                self.cpu.publish(store.destination, store.block_hash, holds=0)
            self.gpu.drop(store.source)

    def _finish_loads(self, loads: list[Load], failed: set[int]) -> None:
        self.journal.count("load_failed_blocks", len(failed))
        self.journal.count("loaded_blocks", len(loads) - len(failed))
        first_failed: dict[Request, int] = {}
        for index in sorted(failed):
            first_failed.setdefault(loads[index].request, loads[index].position)
        published = []
        for index, load in reversed(list(enumerate(loads))):
            if index in failed and self.cpu.slots[load.source].state is State.CACHED:
                self.cpu.withdraw(load.source)
                self.journal.count("cpu_withdrawn_blocks")
            is_good = load.position < first_failed.get(load.request, len(load.request.block_ids))
            if self._land(load, is_good):
                published.append(load)
            self.cpu.drop(load.source)
        for load in reversed(published):
            self._offer_to_store(load.destination, load.block_hash)
        for request in dict.fromkeys(load.request for load in loads):
            if request.live:
                self._finish_request_loads(request, first_failed.get(request))

    def _land(self, load: Load, is_good: bool) -> bool:
        """Decide what the destination of a finished load becomes; True if it is published."""
        if is_good and load.block_hash not in self.gpu.index:
            self.gpu.publish(load.destination, load.block_hash, holds=int(load.request.live))
            return True
        if load.request.live:
            self.gpu.assign(load.destination, State.CLAIMED)
        else:
            self.gpu.make_free(load.destination)
        return False

    def _finish_request_loads(self, request: Request, first_failed: int | None) -> None:
        request.ready = True
        if first_failed is None:
            request.valid_tokens = (request.gpu_hits + request.cpu_hits) * self.block_size
            self.commit(request, request.remembered_commit)
        else:
            request.valid_tokens = first_failed * self.block_size
        request.remembered_commit = 0

    # Everything

    def clear(self) -> bool:
        """Forget every cached block of both tiers, unless a request is live or a ticket is open."""
        if self.requests or self.tickets:
            return False
        self.gpu.clear()
        self.cpu.clear()
        self.store_queue.clear()
        self.journal.count("num_resets")
        return True

    def statistics(self) -> dict[str, int]:
        """Gauges of now and counters since construction."""
        gauges = self.gpu.gauges() | self.cpu.gauges()
        gauges["num_requests"] = len(self.requests)
        gauges["num_tickets"] = len(self.tickets)
        gauges["store_queue_blocks"] = len(self.store_queue)
        return gauges | self.journal.counters

    def _gpu_evicted(self, block_id: int) -> None:
        self.journal.count("gpu_evicted_blocks")
        if block_id in self.store_queue:
            del self.store_queue[block_id]
            self.journal.count("stores_lost_blocks")

    def _cpu_evicted(self, _: int) -> None:
        self.journal.count("cpu_evicted_blocks")
