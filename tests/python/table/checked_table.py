"""A block table with an oracle on top: the same calls, and after each the seven standing checks (O1 to O7).

The oracle predicts counts, ids of hits, loads, readiness and gauges from its own book (`ownership`), and proves
contents with `fake_memory`. It does not predict which free or old block is taken: any that nobody owns is right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from expected_hashes import PLAIN, Identity, block_hashes, fingerprints
from fake_memory import CopyMode, FakeMemory
from kvtier.errors import KvtierError, OutOfBlocksError, StaleTicketError
from ownership import LiveRequest, OpenTicket, Ownership, Pair, Slot

# Gauges may go down; every other statistic is a counter.
GAUGE_ENDINGS = ("blocks", "free_blocks", "claimed_blocks", "cached_blocks", "in_flight_blocks")
GAUGE_ENDINGS += ("held_blocks", "evictable_blocks")
GAUGES = {f"{tier}_{name}" for tier in ("gpu", "cpu") for name in GAUGE_ENDINGS}
GAUGES |= {"num_requests", "num_tickets", "store_queue_blocks"}
MAY_MOVE_ON_REFUSAL = {"num_refused", "num_stale_completions"}


class CheckedTable:
    """Wraps a block table.

    Args:
        table: The table under test.
        mode: When copies take effect.
        max_store_blocks_per_step: As the table was made with.
        root: As the table was made with.
        audit: Whether to call the table's own `audit()` too; without it the oracle stands alone.
    """

    def __init__(
        self,
        table: Any,
        mode: CopyMode,
        max_store_blocks_per_step: int | None = None,
        root: bytes = b"",
        audit: bool = True,
        **_: Any,
    ) -> None:
        self.table = table
        self.block_size = table.block_size
        self.memory = FakeMemory(table.gpu_blocks, table.cpu_blocks, mode)
        self.book = Ownership(table.gpu_blocks, table.cpu_blocks)
        self.prints: dict[bytes, Hashable] = {}
        """Fingerprint of the content that each block hash promises."""
        self.events: list[tuple[str, str, bytes, int]] = []
        """All so far: (kind, tier, block hash, block id)."""
        self._budget = max_store_blocks_per_step
        self._root = root
        self._audit = audit
        self._stats: dict[str, int] = dict(table.stats())
        self._check()

    # Calls

    def admit(self, request_id: Any, tokens: Sequence[int], identity: Identity = PLAIN) -> Any:
        hashes = block_hashes(list(tokens), identity, self.block_size, self._root)
        prints = fingerprints(list(tokens), identity, self.block_size)
        return self._admit(
            lambda: self.table.admit(request_id, tokens, identity.salt, identity.adapter, list(identity.media)),
            LiveRequest(request_id, self.block_size, len(tokens), hashes, prints, [], 0, [], list(tokens), identity),
        )

    def admit_hashed(self, request_id: Any, digests: list[bytes], num_tokens: int) -> Any:
        prints = [self.prints.get(digest, ("digest", digest)) for digest in digests]
        return self._admit(
            lambda: self.table.admit_hashed(request_id, digests, num_tokens),
            LiveRequest(request_id, self.block_size, num_tokens, list(digests), prints, [], 0, [], None, PLAIN),
        )

    def _admit(self, call: Callable[[], Any], request: LiveRequest) -> Any:
        book = self.book
        self._promise(request.hashes, request.prints)
        gpu_ids, cpu_ids = book.find(request.hashes[: (request.num_tokens - 1) // self.block_size])
        hits = len(gpu_ids) + len(cpu_ids)
        needed = -(-request.num_tokens // self.block_size) - len(gpu_ids)
        removable = self._removable("gpu") - {("gpu", block_id) for block_id in gpu_ids}
        admission = self._reserve(call, needed, removable)
        ids = self._ids(admission.block_ids, "gpu")
        found = (admission.gpu_hit_blocks, admission.cpu_hit_blocks, admission.fresh_blocks, admission.cached_tokens)
        assert found == (len(gpu_ids), len(cpu_ids), needed - len(cpu_ids), hits * self.block_size)
        assert ids[: len(gpu_ids)] == gpu_ids, "the hits are the published blocks, in order"
        request.ids, request.gpu_hits, request.sources = ids, len(gpu_ids), cpu_ids
        request.valid_tokens = len(gpu_ids) * self.block_size
        self._take_over(ids[len(gpu_ids) :], needed, removable)
        if cpu_ids:
            request.loads = "planned"
            book.planned.append(request)
        book.requests[request.request_id] = request
        self._check()
        return admission

    def extend(self, request_id: Any, tokens: Sequence[int]) -> list[int]:
        def grow(request: LiveRequest) -> tuple[list[bytes], list[Hashable]]:
            request.tokens += tokens
            return (
                block_hashes(request.tokens, request.identity, self.block_size, self._root),
                fingerprints(request.tokens, request.identity, self.block_size),
            )

        return self._extend(lambda: self.table.extend(request_id, tokens), request_id, len(tokens), grow)

    def extend_hashed(self, request_id: Any, digests: list[bytes], num_tokens: int) -> list[int]:
        def grow(request: LiveRequest) -> tuple[list[bytes], list[Hashable]]:
            more = [self.prints.get(digest, ("digest", digest)) for digest in digests]
            return request.hashes + list(digests), request.prints + more

        call = lambda: self.table.extend_hashed(request_id, digests, num_tokens)  # noqa: E731
        return self._extend(call, request_id, num_tokens, grow)

    def _extend(
        self,
        call: Callable[[], Any],
        request_id: Any,
        num_tokens: int,
        grow: Callable[[LiveRequest], tuple[list[bytes], list[Hashable]]],
    ) -> list[int]:
        request = self.book.requests[request_id]
        needed = -(-(request.num_tokens + num_tokens) // self.block_size) - len(request.ids)
        removable = self._removable("gpu")
        added = self._ids(self._reserve(call, needed, removable), "gpu")
        self._take_over(added, needed, removable)
        request.num_tokens += num_tokens
        request.hashes, request.prints = grow(request)
        request.ids = request.ids + added
        self._promise(request.hashes, request.prints)
        self._check()
        return added

    def commit(self, request_id: Any, num_tokens: int) -> None:
        request = self.book.requests[request_id]
        self._write(request, num_tokens)
        before = request.handled
        self._call(lambda: self.table.commit(request_id, num_tokens))
        if request.loads != "none":
            request.remembered = max(request.remembered, num_tokens)
            self._follow_events({}, set())
        else:
            request.valid_tokens = max(request.valid_tokens, num_tokens)
            self._follow_events(self._own_slots(request, range(before, request.handled)), set())
            self._expect_published("gpu", request.hashes[before : request.handled])
        self._check()

    def _write(self, request: LiveRequest, num_tokens: int) -> None:
        """The engine has computed these tokens: their full blocks have their content, a partial block has junk."""
        if num_tokens <= max(request.valid_tokens, request.remembered):
            return
        cells, last = self.memory.cells["gpu"], num_tokens // self.block_size
        first = request.handled
        if request.loads != "none":
            first = max(request.cached_blocks, request.remembered // self.block_size)
        for position in range(first, last):
            cells[request.ids[position]] = request.prints[position]
        if first <= last < len(request.ids) and num_tokens % self.block_size:
            self.memory.spoil("gpu", [request.ids[last]])

    def release(self, request_id: Any) -> None:
        self._end(self.table.release, request_id)

    def abort(self, request_id: Any) -> None:
        self._end(self.table.abort, request_id)

    def preempt(self, request_id: Any) -> None:
        self._end(self.table.preempt, request_id)

    def _end(self, call: Callable[[Any], None], request_id: Any) -> None:
        request = self.book.requests[request_id]
        self._call(lambda: call(request_id))
        request.live = False
        del self.book.requests[request_id]
        if request in self.book.planned:
            self.book.planned.remove(request)
        written = range(request.handled)
        self._follow_events(self._own_slots(request, written), set())
        self._expect_published("gpu", [request.hashes[position] for position in written])
        self._check()

    def step(self) -> Any:
        return self._step(self.table.step, lambda plan: (plan.loads, plan.stores))

    def get_and_reset_swaps(self) -> Any:
        return self._step(self.table.get_and_reset_swaps, lambda swaps: (swaps.swap_in, swaps.swap_out))

    def _step(self, call: Callable[[], Any], lists: Callable[[Any], tuple[Any, Any]]) -> Any:
        book = self.book
        removable = self._removable("cpu")
        free = book.gauges()["cpu_free_blocks"]
        bounds = [len(book.to_store), free + len(removable)] + ([] if self._budget is None else [self._budget])
        plan = self._call(call)
        loads, stores = (self._pairs(pairs) for pairs in lists(plan))
        owners = [(request, position) for request in book.planned for position in request.load_positions]
        expected = [(request.sources[at - request.gpu_hits], request.ids[at]) for request, at in owners]
        assert loads == expected, "a step loads what was admitted since the last one, in order"
        assert len(stores) == min(bounds), "a step stores as much as it may"
        if hasattr(plan, "not_stored"):
            assert sum(plan.not_stored.values()) == len(book.to_store) - len(stores), "what waits is counted"
            assert 0 not in plan.not_stored.values()
        hashes = []
        for source, destination in stores:
            self._in_range([source], "gpu")
            self._in_range([destination], "cpu")
            assert source in book.to_store, f"gpu block {source} does not wait to be stored"
            book.to_store.remove(source)
            hashes.append(book.hash_at["gpu", source])
        self._follow_events({}, removable)
        for request in book.planned:
            request.loads = "running"
        book.planned = []
        self._open(plan.load_ticket, "load", loads, [request.hashes[at] for request, at in owners], owners)
        self._open(plan.store_ticket, "store", stores, hashes, [])
        book.check_exclusive()
        self._check()
        return plan

    def _open(
        self, number: int | None, kind: Any, pairs: list[Pair], hashes: list[bytes], owners: list[tuple[Any, int]]
    ) -> None:
        if not pairs:
            assert number is None, "an empty list has no ticket"
            return
        assert number == self.book.last_ticket + 1, "ticket numbers rise by one"
        self.book.last_ticket = number
        ticket = OpenTicket(kind, pairs, hashes, owners)
        if kind == "store":
            for _, destination in pairs:
                assert ("cpu", destination) not in self.book.held(), f"O6: cpu block {destination} is held"
        self.book.tickets[number] = ticket
        self.memory.start(ticket.source_tier, ticket.destination_tier, pairs)

    def complete(self, number: int, rank: int = 0, failed: Sequence[int] = ()) -> bool:
        ticket = self.book.tickets.get(number)
        if ticket is None or rank in ticket.acknowledged:
            raise self.refuses(lambda table: table.complete(number, rank, failed), StaleTicketError)
        finished = self._call(lambda: self.table.complete(number, rank, failed))
        ticket.acknowledged.add(rank)
        ticket.failed.update(int(index) for index in failed)
        assert finished == (len(ticket.acknowledged) == self.table.ranks)
        if not finished:
            self._follow_events({}, set())
        else:
            del self.book.tickets[number]
            self.memory.finish(ticket.source_tier, ticket.destination_tier, ticket.pairs, ticket.failed)
            (self._loaded if ticket.kind == "load" else self._stored)(ticket)
        self._check()
        return finished

    def _stored(self, ticket: OpenTicket) -> None:
        copied = [index for index in range(len(ticket.pairs)) if index not in ticket.failed]
        self.book.to_store.update(ticket.pairs[index][0] for index in ticket.failed)
        self._follow_events({("cpu", ticket.pairs[index][1]): ticket.hashes[index] for index in copied}, set())
        self._expect_published("cpu", [ticket.hashes[index] for index in copied])

    def _loaded(self, ticket: OpenTicket) -> None:
        first_failed: dict[LiveRequest, int] = {}
        for index in sorted(ticket.failed):
            first_failed.setdefault(*ticket.owners[index])
        allowed: dict[Slot, bytes] = {}
        must: list[bytes] = []
        for index, (request, position) in enumerate(ticket.owners):
            behind_failure = request.live and position >= first_failed.get(request, position + 1)
            if index not in ticket.failed and not behind_failure:
                allowed["gpu", ticket.pairs[index][1]] = ticket.hashes[index]
                must.append(ticket.hashes[index])
        for request in dict.fromkeys(request for request, _ in ticket.owners):
            if not request.live:
                continue
            request.loads = "none"
            if request in first_failed:
                # What was computed behind a failed load was computed from junk.
                request.valid_tokens = first_failed[request] * self.block_size
                self.memory.spoil("gpu", request.ids[first_failed[request] :])
            else:
                request.valid_tokens = max(request.cached_blocks * self.block_size, request.remembered)
                late = range(request.cached_blocks, request.handled)
                allowed |= self._own_slots(request, late)
                must += [request.hashes[position] for position in late]
            request.remembered = 0
        withdrawn = {("cpu", ticket.pairs[index][0]) for index in ticket.failed}
        self._follow_events(allowed, withdrawn)
        self._expect_published("gpu", must)
        assert not withdrawn & set(self.book.hash_at), "a copy that failed to load is no hit any more"

    def promise(self, tokens: Sequence[int], identity: Identity = PLAIN) -> list[bytes]:
        """The hashes of the full blocks of these tokens, noted as the key of their content."""
        hashes = block_hashes(list(tokens), identity, self.block_size, self._root)
        self._promise(hashes, fingerprints(list(tokens), identity, self.block_size))
        return hashes

    def reset(self) -> bool:
        idle = not self.book.requests and not self.book.tickets
        done = self._call(self.table.reset)
        assert done == idle, "reset succeeds if and only if nobody uses the table"
        self._follow_events({}, set(self.book.hash_at) if done else set())
        assert not done or not self.book.hash_at, "nothing outlives a reset"
        self._check()
        return done

    def lookup(self, tokens: Sequence[int], identity: Identity = PLAIN) -> tuple[int, int]:
        found = self._call(
            lambda: self.table.lookup(tokens, identity.salt, identity.adapter, list(identity.media)), pure=True
        )
        hashes = block_hashes(list(tokens), identity, self.block_size, self._root)
        self._same_hits(found, hashes[: max(len(tokens) - 1, 0) // self.block_size])
        return found

    def lookup_hashed(self, digests: list[bytes]) -> tuple[int, int]:
        found = self._call(lambda: self.table.lookup_hashed(digests), pure=True)
        self._same_hits(found, digests)
        return found

    def refuses(self, call: Callable[[Any], Any], *errors: type[Exception]) -> Exception:
        """The error of a call on the bare table that must fail with one of these and change nothing."""
        try:
            result = self._call(lambda: call(self.table), other_errors=errors)
        except errors as error:
            return error
        raise AssertionError(f"O5: accepted, with the result {result}")

    # Checks

    def _call(self, call: Callable[[], Any], pure: bool = False, other_errors: tuple[Any, ...] = ()) -> Any:
        try:
            result = call()
        except (KvtierError, *other_errors):
            self._unchanged(MAY_MOVE_ON_REFUSAL)
            raise
        except (KeyboardInterrupt, AssertionError):
            raise
        except BaseException as error:
            raise AssertionError(f"O5: {type(error).__name__} is no documented error: {error}") from error
        if pure:
            self._unchanged(set())
        return result

    def _unchanged(self, except_for: set[str]) -> None:
        before, after = self._stats, dict(self.table.stats())
        moved = {name for name in after if after[name] != before[name]}
        assert moved <= except_for, f"changed by a call that must change nothing: {moved}"
        assert not self.table.events(), "an event of a call that must change nothing"
        self._check()

    def _reserve(self, call: Callable[[], Any], needed: int, removable: set[Slot]) -> Any:
        available = self.book.gauges()["gpu_free_blocks"] + len(removable)
        try:
            result = self._call(call)
        except OutOfBlocksError as error:
            expected = (needed, available, self.table.gpu_blocks)
            assert (error.needed, error.available, error.total) == expected
            assert needed > available, "refused although there was room"
            raise
        assert needed <= available, "admitted although there was no room"
        return result

    def _take_over(self, new_ids: list[int], needed: int, removable: set[Slot]) -> None:
        """New ids belong to nobody; the request that gets them finds junk in them."""
        assert len(new_ids) == len(set(new_ids)) == needed
        self._follow_events({}, removable)
        taken = set(self.book.held()) | set(self.book.destinations()) | set(self.book.hash_at)
        for block_id in new_ids:
            assert ("gpu", block_id) not in taken, f"O6: gpu block {block_id} was handed out while it has an owner"
        self.memory.spoil("gpu", new_ids)

    def _removable(self, tier: str) -> set[Slot]:
        """Published blocks that nobody holds."""
        held = self.book.held()
        return {slot for slot in self.book.hash_at if slot[0] == tier and slot not in held}

    def _own_slots(self, request: LiveRequest, positions: range) -> dict[Slot, bytes]:
        return {("gpu", request.ids[position]): request.hashes[position] for position in positions}

    def _follow_events(self, may_be_stored: dict[Slot, bytes], may_be_removed: set[Slot]) -> None:
        """Enter the events of a call in the book; each must be one that this call may cause."""
        for event in self.table.events():
            kind, tier, name, block_id = event.kind, event.tier, event.block_hash, event.block_id
            slot = (tier, block_id)
            self.events.append((kind, tier, name, block_id))
            self._in_range([block_id], tier)
            if kind == "stored":
                assert may_be_stored.get(slot) == name, f"O2: {slot} must not be published by this call"
                assert self.memory.cells[tier][block_id] == self.prints[name], f"O2: {slot} published with junk"
                self.book.publish(tier, name, block_id)
            else:
                assert kind == "removed"
                assert slot in may_be_removed, f"O6: {slot} must not be removed by this call"
                self.book.remove(tier, name, block_id)

    def _expect_published(self, tier: str, hashes: list[bytes]) -> None:
        missing = [name for name in hashes if name not in self.book.published[tier]]
        assert not missing, f"{len(missing)} written blocks are no hits in the {tier} tier"

    def _promise(self, hashes: list[bytes], prints: list[Any]) -> None:
        for name, content in zip(hashes, prints, strict=True):
            assert self.prints.setdefault(name, content) == content, "one hash promises two contents"

    def _same_hits(self, found: tuple[int, int], hashes: list[bytes]) -> None:
        gpu_ids, cpu_ids = self.book.find(hashes)
        assert tuple(found) == (len(gpu_ids), len(cpu_ids)), "lookup tells what is published"

    def _ids(self, block_ids: Any, tier: str) -> list[int]:
        assert block_ids.dtype == "int32"
        assert block_ids.ndim == 1
        ids = block_ids.tolist()
        self._in_range(ids, tier)
        return ids

    def _in_range(self, ids: list[int], tier: str) -> None:
        assert all(0 <= block_id < self.book.sizes[tier] for block_id in ids), f"O4: {ids} not all in the {tier} tier"

    @staticmethod
    def _pairs(pairs: Any) -> list[Pair]:
        if not isinstance(pairs, list):
            assert pairs.dtype == "int32"
            assert pairs.shape == (len(pairs), 2)
            pairs = pairs.tolist()
        return [(source, destination) for source, destination in pairs]

    def _check(self) -> None:
        book, cells = self.book, self.memory.cells
        book.check_exclusive()
        if self._audit:
            self.table.audit()
        stats = dict(self.table.stats())
        for tier in ("gpu", "cpu"):
            states = sum(stats[f"{tier}_{state}_blocks"] for state in ("free", "claimed", "cached", "in_flight"))
            assert states == stats[f"{tier}_blocks"], f"O1: the states of the {tier} tier do not add up: {stats}"
        expected = book.gauges()
        wrong = {name: (stats[name], value) for name, value in expected.items() if stats[name] != value}
        assert not wrong, f"O1: (table, oracle) disagree: {wrong}"
        assert set(expected) == GAUGES
        for name, value in stats.items():
            assert value >= 0, f"O7: {name} is {value}"
            assert name in GAUGES or value >= self._stats[name], f"O7: {name} went down"
        self._stats = stats
        self._check_sums(stats)
        for (tier, block_id), name in book.hash_at.items():
            assert cells[tier][block_id] == self.prints[name], f"O2: {tier} block {block_id} is not what its key says"
        for request_id, request in book.requests.items():
            for position in range(request.handled):
                content = cells["gpu"][request.ids[position]]
                assert content == request.prints[position], f"O2: block {position} of {request_id} is wrong"
            assert self.table.block_ids(request_id).tolist() == request.ids
            assert self.table.valid_tokens(request_id) == request.valid_tokens
            assert self.table.is_ready(request_id) == (request.loads == "none")
        assert self.table.open_tickets() == list(book.tickets)
        if not book.requests and not book.tickets:
            usable = stats["gpu_free_blocks"] + stats["gpu_evictable_blocks"]
            assert usable == stats["gpu_blocks"], "O3: an idle table cannot give all its Gpu blocks"
            assert stats["cpu_held_blocks"] == 0, "O3: an idle table holds Cpu blocks"

    def _check_sums(self, stats: dict[str, int]) -> None:
        """Whatever was planned has come to an end or runs."""
        running = {"load": 0, "store": 0}
        for ticket in self.book.tickets.values():
            running[ticket.kind] += len(ticket.pairs)
        ended = sum(stats[name] for name in ("num_released", "num_aborted", "num_preempted"))
        assert stats["num_admitted"] == ended + stats["num_requests"]
        assert stats["loads_planned_blocks"] == (
            stats["loaded_blocks"] + stats["load_failed_blocks"] + running["load"]
        )
        assert stats["stores_planned_blocks"] == (
            stats["stored_blocks"] + stats["store_failed_blocks"] + running["store"]
        )
        planned = sum(len(request.sources) for request in self.book.planned)
        assert stats["cpu_hit_blocks"] == stats["loads_planned_blocks"] + stats["loads_cancelled_blocks"] + planned
        assert stats["stores_lost_blocks"] <= stats["gpu_evicted_blocks"]
