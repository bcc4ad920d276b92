"""A block table with an oracle on top: the same calls, and after each the standing checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from expected_hashes import PLAIN, Identity, block_hashes, fingerprints
from kvtier.errors import StaleTicketError
from ownership import LiveRequest, OpenTicket, Pair, Slot
from standing_checks import StandingChecks


class CheckedTable(StandingChecks):
    """Every call of a block table; the oracle follows each in its book before it checks."""

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
        expected = (len(gpu_ids), len(cpu_ids), needed - len(cpu_ids), hits * self.block_size)
        assert found == expected, f"admitted with (gpu hits, cpu hits, fresh, tokens) = {found}, not {expected}"
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
        assert finished == (len(ticket.acknowledged) == self.table.ranks), "the last rank finishes the ticket, no other"
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
            behind_failure = position >= first_failed.get(request, position + 1)
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
