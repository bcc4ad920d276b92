"""The seven standing checks (O1 to O7) on a block table, from what the oracle's book and fake memory say.

The oracle predicts counts, ids of hits, loads, readiness and gauges from its own book (`ownership`), and proves
contents with `fake_memory`. It does not predict which free or old block is taken: any that nobody owns is right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from expected_hashes import PLAIN, Identity, block_hashes, fingerprints
from fake_memory import CopyMode, FakeMemory
from kvtier.errors import KvtierError, OutOfBlocksError
from ownership import LiveRequest, Ownership, Pair, Slot

# Gauges may go down; every other statistic is a counter.
GAUGE_ENDINGS = ("blocks", "free_blocks", "claimed_blocks", "cached_blocks", "in_flight_blocks")
GAUGE_ENDINGS += ("held_blocks", "evictable_blocks")
GAUGES = {f"{tier}_{name}" for tier in ("gpu", "cpu") for name in GAUGE_ENDINGS}
GAUGES |= {"num_requests", "num_tickets", "store_queue_blocks"}
MAY_MOVE_ON_REFUSAL = {"num_refused", "num_stale_completions"}


class StandingChecks:
    """A block table under test, and all that must be true of it after every call.

    Args:
        table: The table under test.
        mode: When copies take effect.
        max_store_blocks_per_step: As the table was made with.
        root: As the table was made with.
        audit: Whether to call the table's own `audit()` too.
        gauges: Whether to compare the gauges of `stats()` with the book. Without both, the oracle stands alone: it
            sees only ids, tickets, events, and what is in memory.
    """

    def __init__(
        self,
        table: Any,
        mode: CopyMode,
        max_store_blocks_per_step: int | None = None,
        root: bytes = b"",
        audit: bool = True,
        gauges: bool = True,
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
        self._gauges = gauges
        self._stats: dict[str, int] = dict(table.stats())
        self._check()

    def promise(self, tokens: Sequence[int], identity: Identity = PLAIN) -> list[bytes]:
        """The hashes of the full blocks of these tokens, noted as the key of their content."""
        hashes = block_hashes(list(tokens), identity, self.block_size, self._root)
        self._promise(hashes, fingerprints(list(tokens), identity, self.block_size))
        return hashes

    def refuses(self, call: Callable[[Any], Any], *errors: type[Exception]) -> Exception:
        """The error of a call on the bare table that must fail with one of these and change nothing."""
        try:
            result = self._call(lambda: call(self.table), other_errors=errors)
        except errors as error:
            return error
        raise AssertionError(f"O5: accepted, with the result {result}")

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
            shown = (error.needed, error.available, error.total)
            assert shown == expected, f"refused with (needed, available, total) = {shown}, not {expected}"
            assert needed > available, "refused although there was room"
            raise
        assert needed <= available, "admitted although there was no room"
        return result

    def _take_over(self, new_ids: list[int], needed: int, removable: set[Slot]) -> None:
        """New ids belong to nobody; the request that gets them finds junk in them."""
        assert len(new_ids) == len(set(new_ids)) == needed, f"{new_ids} are not {needed} blocks"
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
        assert not (wrong and self._gauges), f"O1: (table, oracle) disagree: {wrong}"
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
            assert self.table.block_ids(request_id).tolist() == request.ids, f"{request_id} has other blocks"
            valid = self.table.valid_tokens(request_id)
            assert valid == request.valid_tokens, f"{request_id}: {valid} valid tokens, not {request.valid_tokens}"
            ready = self.table.is_ready(request_id)
            assert ready == (request.loads == "none"), f"{request_id}: ready is {ready}, loads: {request.loads}"
        assert self.table.open_tickets() == list(book.tickets), "other tickets are open"
        if not book.requests and not book.tickets:
            for tier in ("gpu", "cpu"):
                usable = stats[f"{tier}_free_blocks"] + stats[f"{tier}_evictable_blocks"]
                assert usable == stats[f"{tier}_blocks"], f"O3: an idle table cannot use its whole {tier} tier"
            assert stats["cpu_held_blocks"] == 0, "O3: an idle table holds Cpu blocks"

    def _check_sums(self, stats: dict[str, int]) -> None:
        """Whatever was planned has come to an end or runs."""
        running = {"load": 0, "store": 0}
        for ticket in self.book.tickets.values():
            running[ticket.kind] += len(ticket.pairs)
        ended = sum(stats[name] for name in ("num_released", "num_aborted", "num_preempted"))
        waiting = sum(len(request.sources) for request in self.book.planned)
        for whole, parts in (
            ("num_admitted", ended + stats["num_requests"]),
            ("loads_planned_blocks", stats["loaded_blocks"] + stats["load_failed_blocks"] + running["load"]),
            ("stores_planned_blocks", stats["stored_blocks"] + stats["store_failed_blocks"] + running["store"]),
            ("cpu_hit_blocks", stats["loads_planned_blocks"] + stats["loads_cancelled_blocks"] + waiting),
        ):
            assert stats[whole] == parts, f"{whole} is {stats[whole]}, its parts are {parts}"
        assert stats["stores_lost_blocks"] <= stats["gpu_evicted_blocks"], "lost stores are evicted blocks"
