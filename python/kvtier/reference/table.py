"""The block table of the twin; docs/design.md states each rule that it follows."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kvtier.errors import ConfigError, OutOfBlocksError, StaleTicketError, UnknownRequestError
from kvtier.reference import arguments, hashing
from kvtier.reference.audit import audit
from kvtier.reference.request import Load, Request, Store, Ticket
from kvtier.reference.results import Admission, Event, Plan, Swaps, id_array, pair_array
from kvtier.reference.tier import State, Tier, TierName

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtier._core import Digests, TokenIds

Identity = hashing.Identity
Adapter = hashing.Adapter
MediaItem = hashing.MediaItem

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


class ReferenceBlockTable:
    """The block allocator of an engine, with a Gpu tier and a Cpu tier; see `kvtier.BlockTable` for every call."""

    def __init__(
        self,
        gpu_blocks: int,
        cpu_blocks: int,
        block_size: int,
        policy: str = "lru",
        store: str = "eager",
        max_store_blocks_per_step: int | None = None,
        ranks: int = 1,
        hash: str = "sha256",
        root: bytes = b"",
    ) -> None:
        self.gpu_blocks = arguments.integer("gpu_blocks", gpu_blocks, 1, 2**24)
        self.cpu_blocks = arguments.integer("cpu_blocks", cpu_blocks, 0, 2**24)
        self.block_size = arguments.integer("block_size", block_size, 1, 65536)
        arguments.choice("policy", policy, ["lru"])
        arguments.choice("store", store, ["eager"])
        self._max_store_blocks = self.cpu_blocks
        if max_store_blocks_per_step is not None:
            self._max_store_blocks = arguments.integer(
                "max_store_blocks_per_step", max_store_blocks_per_step, 0, arguments.MAX_COUNT
            )
        self.ranks = arguments.integer("ranks", ranks, 1, 64)
        arguments.choice("hash", hash, ["sha256"])
        if not isinstance(root, bytes):
            raise TypeError(f"root must be bytes, not {type(root).__name__}")
        self._root = hashing.root_hash(self.block_size, root)

        self._counters = dict.fromkeys(COUNTERS, 0)
        self._events: deque[Event] = deque()
        self._gpu = Tier("gpu", self.gpu_blocks, self._record, self._gpu_evicted)
        self._cpu = Tier("cpu", self.cpu_blocks, self._record, self._cpu_evicted)
        self._requests: dict[str | int, Request] = {}
        self._planned_loads: list[Load] = []
        self._store_queue: OrderedDict[int, None] = OrderedDict()
        """Cached Gpu blocks that wait for a copy in the Cpu tier, oldest first."""
        self._receiving: set[bytes] = set()
        """Hashes of the blocks on their way into the Cpu tier."""
        self._tickets: dict[int, Ticket] = {}
        self._last_ticket = 0

    # Admission

    def admit(
        self,
        request_id: str | int,
        token_ids: TokenIds,
        salt: Identity | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Admission:
        """Hold the longest usable prefix and reserve Gpu blocks for all tokens; or change nothing."""
        key = arguments.request_id(request_id)
        tokens = arguments.token_ids(token_ids)
        if not tokens:
            raise ConfigError("token_ids", "no tokens", "must be at least one")
        chain, hashes = self._chain(tokens, salt, adapter, media)
        return self._admit(key, len(tokens), chain, hashes)

    def admit_hashed(self, request_id: str | int, digests: Digests, num_tokens: int) -> Admission:
        """As `admit`, with the hashes of the full blocks given."""
        key = arguments.request_id(request_id)
        hashes = arguments.digests(digests)
        count = arguments.integer("num_tokens", num_tokens, 1, arguments.MAX_COUNT)
        arguments.digest_count(hashes, count // self.block_size)
        return self._admit(key, count, hashing.HashedChain(), hashes)

    def _admit(
        self, key: str | int, num_tokens: int, chain: hashing.TokenChain | hashing.HashedChain, hashes: list[bytes]
    ) -> Admission:
        if key in self._requests:
            raise ConfigError("request_id", repr(key), "is in use by a live request")
        usable = hashes[: (num_tokens - 1) // self.block_size]
        gpu_hits, cpu_hits = self._find(usable)
        gpu_ids = [self._gpu.index[block_hash] for block_hash in usable[:gpu_hits]]
        cpu_ids = [self._cpu.index[block_hash] for block_hash in usable[gpu_hits : gpu_hits + cpu_hits]]
        needed = self._num_blocks(num_tokens) - gpu_hits
        # A set: a hashed chain may name one block twice, which costs only one evictable block.
        hits_evictable = {block_id for block_id in gpu_ids if block_id in self._gpu.eviction_order}
        self._require(needed, self._gpu.num_available - len(hits_evictable))

        for block_id in gpu_ids:
            self._gpu.hold(block_id)
        for block_id in cpu_ids:
            self._cpu.hold(block_id)
        new_ids = self._gpu.allocate(needed, State.CLAIMED)
        gpu_tokens, cpu_tokens = gpu_hits * self.block_size, cpu_hits * self.block_size
        request = Request(
            key, num_tokens, chain, hashes, gpu_ids + new_ids, gpu_hits, cpu_hits, gpu_tokens, ready=cpu_hits == 0
        )
        self._requests[key] = request
        for position, source in enumerate(cpu_ids, start=gpu_hits):
            destination = request.block_ids[position]
            self._gpu.assign(destination, State.IN_FLIGHT)
            self._planned_loads.append(Load(request, position, hashes[position], source, destination))

        self._count("num_admitted", 1)
        self._count("prompt_tokens", num_tokens)
        self._count("gpu_hit_blocks", gpu_hits)
        self._count("cpu_hit_blocks", cpu_hits)
        self._count("gpu_hit_tokens", gpu_tokens)
        self._count("cpu_hit_tokens", cpu_tokens)
        self._count("loads_planned_blocks", cpu_hits)
        self._count("fresh_blocks", needed - cpu_hits)
        return Admission(
            id_array(request.block_ids), gpu_hits, cpu_hits, needed - cpu_hits, cached_tokens=gpu_tokens + cpu_tokens
        )

    def extend(self, request_id: str | int, token_ids: TokenIds) -> npt.NDArray[np.int32]:
        """Add tokens at the end of a request that was admitted with `admit`."""
        request = self._request(request_id)
        tokens = arguments.token_ids(token_ids)
        if isinstance(request.chain, hashing.HashedChain):
            raise ConfigError("request_id", repr(request.request_id), "must be admitted with admit, not admit_hashed")
        chain, hashes = request.chain.extended(tokens)
        return self._extend(request, len(tokens), chain, hashes)

    def extend_hashed(self, request_id: str | int, digests: Digests, num_tokens: int) -> npt.NDArray[np.int32]:
        """Add tokens at the end of a request that was admitted with `admit_hashed`."""
        request = self._request(request_id)
        hashes = arguments.digests(digests)
        count = arguments.integer("num_tokens", num_tokens, 0, arguments.MAX_COUNT)
        if not isinstance(request.chain, hashing.HashedChain):
            raise ConfigError("request_id", repr(request.request_id), "must be admitted with admit_hashed, not admit")
        full_before, full_after = (n // self.block_size for n in (request.num_tokens, request.num_tokens + count))
        arguments.digest_count(hashes, full_after - full_before)
        return self._extend(request, count, request.chain, hashes)

    def _extend(
        self,
        request: Request,
        num_tokens: int,
        chain: hashing.TokenChain | hashing.HashedChain,
        hashes: list[bytes],
    ) -> npt.NDArray[np.int32]:
        needed = self._num_blocks(request.num_tokens + num_tokens) - len(request.block_ids)
        self._require(needed, self._gpu.num_available)
        new_ids = self._gpu.allocate(needed, State.CLAIMED)
        request.num_tokens += num_tokens
        request.chain = chain
        request.hashes += hashes
        request.block_ids += new_ids
        self._count("fresh_blocks", needed)
        return id_array(new_ids)

    def _require(self, needed: int, available: int) -> None:
        if needed > available:
            self._count("num_refused", 1)
            raise OutOfBlocksError(needed, available, self.gpu_blocks)

    # Lookup

    def lookup(
        self,
        token_ids: TokenIds,
        salt: Identity | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> tuple[int, int]:
        """How many blocks `admit` would find now, in the Gpu tier and after those in the Cpu tier."""
        tokens = arguments.token_ids(token_ids)
        _, hashes = self._chain(tokens, salt, adapter, media)
        return self._find(hashes[: max(len(tokens) - 1, 0) // self.block_size])

    def lookup_hashed(self, digests: Digests) -> tuple[int, int]:
        """As `lookup`, over all the given hashes."""
        return self._find(arguments.digests(digests))

    def block_hashes(
        self,
        token_ids: TokenIds,
        salt: Identity | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> bytes:
        """The hashes of the full blocks of these tokens, 32 bytes each."""
        _, hashes = self._chain(arguments.token_ids(token_ids), salt, adapter, media)
        return b"".join(hashes)

    def _chain(
        self, tokens: list[int], salt: Identity | None, adapter: Adapter | None, media: Sequence[MediaItem]
    ) -> tuple[hashing.TokenChain, list[bytes]]:
        root = hashing.request_root(self._root, arguments.salt(salt), arguments.adapter(adapter))
        items = hashing.sorted_media(arguments.media(media, len(tokens)))
        return hashing.TokenChain(self.block_size, root, items).extended(tokens)

    def _find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Leading blocks in the Gpu tier, then blocks in the Cpu tier; a block in neither ends the prefix."""
        gpu_hits = 0
        while gpu_hits < len(hashes) and hashes[gpu_hits] in self._gpu.index:
            gpu_hits += 1
        cpu_hits = 0
        while gpu_hits + cpu_hits < len(hashes) and hashes[gpu_hits + cpu_hits] in self._cpu.index:
            cpu_hits += 1
        return gpu_hits, cpu_hits

    # A live request

    def commit(self, request_id: str | int, num_tokens: int) -> None:
        """Say that the KV of the request's first tokens is written."""
        request = self._request(request_id)
        count = arguments.integer("num_tokens", num_tokens, 0, request.num_tokens)
        if request.ready:
            self._commit(request, count)
        else:
            request.remembered_commit = max(request.remembered_commit, count)

    def _commit(self, request: Request, num_tokens: int) -> None:
        for position in range(self._num_handled(request), num_tokens // self.block_size):
            if request.hashes[position] not in self._gpu.index:
                self._publish_gpu(request.block_ids[position], request.hashes[position], holds=1)
        request.valid_tokens = max(request.valid_tokens, num_tokens)

    def _num_handled(self, request: Request) -> int:
        """Leading blocks whose contents are known to be written: hits that came through, and committed ones."""
        return request.valid_tokens // self.block_size

    def _publish_gpu(self, block_id: int, block_hash: bytes, holds: int) -> None:
        self._gpu.publish(block_id, block_hash, holds)
        if self.cpu_blocks and block_hash not in self._cpu.index and block_hash not in self._receiving:
            self._store_queue[block_id] = None

    def is_ready(self, request_id: str | int) -> bool:
        """Whether all loads of the request have finished."""
        return self._request(request_id).ready

    def valid_tokens(self, request_id: str | int) -> int:
        """How many leading tokens have valid KV now."""
        return self._request(request_id).valid_tokens

    def block_ids(self, request_id: str | int) -> npt.NDArray[np.int32]:
        """All Gpu block ids of a live request, in order."""
        return id_array(self._request(request_id).block_ids)

    # The end of a request

    def release(self, request_id: str | int) -> None:
        """End a finished request."""
        self._end(request_id, "num_released")

    def abort(self, request_id: str | int) -> None:
        """End a request that will not finish."""
        self._end(request_id, "num_aborted")

    def preempt(self, request_id: str | int) -> None:
        """End a request that will be admitted again later."""
        self._end(request_id, "num_preempted")

    def _end(self, request_id: str | int, counter: str) -> None:
        request = self._request(request_id)
        self._count(counter, 1)
        del self._requests[request.request_id]
        request.live = False
        request.remembered_commit = 0
        cancelled = {load.position: load for load in self._planned_loads if load.request is request}
        self._planned_loads = [load for load in self._planned_loads if load.request is not request]
        self._count("loads_cancelled_blocks", len(cancelled))
        # Tail first: a parent becomes younger than its children and outlives them.
        for position in reversed(range(len(request.block_ids))):
            block_id = request.block_ids[position]
            written = position < self._num_handled(request)
            if position in cancelled:
                self._gpu.make_free(block_id)
                self._cpu.drop(cancelled[position].source)
            elif self._gpu.slots[block_id].state is State.CLAIMED and written:
                self._end_duplicate(block_id, request.hashes[position])
            elif self._gpu.slots[block_id].state is not State.IN_FLIGHT:
                self._gpu.drop(block_id)
            if written and position >= request.gpu_hits:
                copy = self._cpu.find(request.hashes[position])
                if copy is not None:
                    self._cpu.refresh(copy)

    def _end_duplicate(self, block_id: int, block_hash: bytes) -> None:
        published = self._gpu.find(block_hash)
        if published is None:
            self._publish_gpu(block_id, block_hash, holds=0)
        else:
            self._gpu.drop(block_id)
            self._gpu.refresh(published)

    # Copies

    def step(self) -> Plan:
        """Plan the copies that are due now: all loads, then stores within the budget."""
        loads, load_ticket, stores, store_ticket, not_stored = self._step()
        return Plan(
            loads=pair_array([(load.source, load.destination) for load in loads]),
            stores=pair_array([(store.source, store.destination) for store in stores]),
            load_ticket=load_ticket,
            store_ticket=store_ticket,
            not_stored=not_stored,
        )

    def get_and_reset_swaps(self) -> Swaps:
        """As `step`, in the form `(blocks to swap out, blocks to swap in)`."""
        loads, load_ticket, stores, store_ticket, _ = self._step()
        return Swaps(
            swap_out=[(store.source, store.destination) for store in stores],
            swap_in=[(load.source, load.destination) for load in loads],
            store_ticket=store_ticket,
            load_ticket=load_ticket,
        )

    def _step(self) -> tuple[list[Load], int | None, list[Store], int | None, dict[str, int]]:
        loads, self._planned_loads = self._planned_loads, []
        load_ticket = self._open("load", loads, []) if loads else None
        stores, not_stored = self._plan_stores()
        store_ticket = self._open("store", [], stores) if stores else None
        return loads, load_ticket, stores, store_ticket, not_stored

    def _open(self, kind: Literal["load", "store"], loads: list[Load], stores: list[Store]) -> int:
        self._last_ticket += 1
        self._tickets[self._last_ticket] = Ticket(kind, loads, stores, set(range(self.ranks)))
        return self._last_ticket

    def _plan_stores(self) -> tuple[list[Store], dict[str, int]]:
        cpu_slots = self._cpu.num_available
        count = min(len(self._store_queue), self._max_store_blocks, cpu_slots)
        stores: list[Store] = []
        for destination in self._cpu.allocate(count, State.IN_FLIGHT):
            source, _ = self._store_queue.popitem(last=False)
            block_hash = self._gpu.slots[source].block_hash
            self._gpu.hold(source)
            self._receiving.add(block_hash)
            stores.append(Store(block_hash, source, destination))
        self._count("stores_planned_blocks", count)
        left = len(self._store_queue)
        if not left:
            return stores, {}
        reason = "budget" if self._max_store_blocks < cpu_slots else "no_cpu_slot"
        self._count(f"stores_deferred_{reason}_blocks", left)
        return stores, {reason: left}

    def complete(self, ticket: int, rank: int = 0, failed: Sequence[int] = ()) -> bool:
        """Acknowledge the copies of a ticket; True if this was the last rank."""
        number = operator.index(ticket)
        entry = self._tickets.get(number)
        if entry is None:
            self._count("num_stale_completions", 1)
            finished = 1 <= number <= self._last_ticket
            raise StaleTicketError(number, "is already finished" if finished else "was never issued")
        rank = arguments.integer("rank", rank, 0, self.ranks - 1)
        if rank not in entry.waiting_ranks:
            self._count("num_stale_completions", 1)
            raise StaleTicketError(number, f"rank {rank} has acknowledged it before")
        entry.failed |= arguments.failed_pairs(failed, entry.num_pairs)
        entry.waiting_ranks.remove(rank)
        if entry.waiting_ranks:
            return False
        del self._tickets[number]
        if entry.kind == "load":
            self._finish_loads(entry.loads, entry.failed)
        else:
            self._finish_stores(entry.stores, entry.failed)
        return True

    def _finish_stores(self, stores: list[Store], failed: set[int]) -> None:
        self._receiving.difference_update(store.block_hash for store in stores)
        self._count("store_failed_blocks", len(failed))
        self._count("stored_blocks", len(stores) - len(failed))
        for index in sorted(failed):
            self._cpu.make_free(stores[index].destination)
            self._store_queue[stores[index].source] = None
        for index, store in reversed(list(enumerate(stores))):
            if index not in failed:
                self._cpu.publish(store.destination, store.block_hash, holds=0)
            self._gpu.drop(store.source)

    def _finish_loads(self, loads: list[Load], failed: set[int]) -> None:
        self._count("load_failed_blocks", len(failed))
        self._count("loaded_blocks", len(loads) - len(failed))
        first_failed: dict[Request, int] = {}
        for index in sorted(failed):
            first_failed.setdefault(loads[index].request, loads[index].position)
        for index, load in reversed(list(enumerate(loads))):
            ok = index not in failed
            if not ok and self._cpu.slots[load.source].state is State.CACHED:
                self._cpu.withdraw(load.source)
                self._count("cpu_withdrawn_blocks", 1)
            self._land(load, ok and load.position < first_failed.get(load.request, load.position + 1), ok)
            self._cpu.drop(load.source)
        for request in dict.fromkeys(load.request for load in loads):
            if request.live:
                request.ready = True
                whole = request.gpu_hits + request.cpu_hits
                request.valid_tokens = first_failed.get(request, whole) * self.block_size
                if request not in first_failed:
                    self._commit(request, request.remembered_commit)
                request.remembered_commit = 0

    def _land(self, load: Load, usable: bool, ok: bool) -> None:
        """Decide what the destination of a finished load becomes."""
        new = load.block_hash not in self._gpu.index
        if load.request.live:
            self._gpu.assign(load.destination, State.CLAIMED)
            if usable and new:
                self._publish_gpu(load.destination, load.block_hash, holds=1)
        elif ok and new:
            self._publish_gpu(load.destination, load.block_hash, holds=0)
        else:
            self._gpu.make_free(load.destination)

    def open_tickets(self) -> list[int]:
        """Tickets that wait for an acknowledgement, oldest first."""
        return list(self._tickets)

    # The whole table

    def reset(self) -> bool:
        """Forget every cached block of both tiers, unless a request is live or a ticket is open."""
        if self._requests or self._tickets:
            return False
        self._gpu.clear()
        self._cpu.clear()
        self._store_queue.clear()
        self._count("num_resets", 1)
        return True

    def stats(self) -> dict[str, int]:
        """Gauges of now and counters since construction, by name."""
        gauges = self._gpu.gauges() | self._cpu.gauges()
        gauges["num_requests"] = len(self._requests)
        gauges["num_tickets"] = len(self._tickets)
        gauges["store_queue_blocks"] = len(self._store_queue)
        return gauges | self._counters

    def events(self) -> list[Event]:
        """What became a hit and what ceased to be one since the last call, in order."""
        drained = list(self._events)
        self._events.clear()
        return drained

    def audit(self) -> None:
        """Prove the table's invariants; raises `InvariantError` if one does not hold."""
        audit(self)

    # Small things

    def _request(self, request_id: str | int) -> Request:
        key = arguments.request_id(request_id)
        if key not in self._requests:
            raise UnknownRequestError(key)
        return self._requests[key]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _count(self, counter: str, amount: int) -> None:
        self._counters[counter] += amount

    def _record(self, kind: Literal["stored", "removed"], tier: TierName, block_hash: bytes, block_id: int) -> None:
        if len(self._events) == MAX_WAITING_EVENTS:
            self._events.popleft()
            self._count("events_dropped", 1)
        self._events.append(Event(kind, tier, block_hash, block_id))

    def _gpu_evicted(self, block_id: int) -> None:
        self._count("gpu_evicted_blocks", 1)
        if block_id in self._store_queue:
            del self._store_queue[block_id]
            self._count("stores_lost_blocks", 1)

    def _cpu_evicted(self, block_id: int) -> None:
        self._count("cpu_evicted_blocks", 1)
