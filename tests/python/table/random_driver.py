"""Random calls on a checked table: a small alphabet and tiny tiers, so that everything collides."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

from expected_hashes import Identity
from fake_memory import CopyMode
from kvtier.errors import ConfigError, OutOfBlocksError, StaleTicketError, UnknownRequestError
from table_harness import Harness

SALTS = [None] * 2 + ["x", b"y", 7]
ADAPTERS = [None] * 2 + ["x", 1, ("x", 1)]
MEDIA_HASHES = ["cat", b"dog", 3]

WEIGHTS = {
    "admit": 18,
    "admit_hashed": 10,
    "extend": 10,
    "commit": 12,
    "commit_all": 12,
    "step": 12,
    "get_and_reset_swaps": 3,
    "complete": 18,
    "complete_again": 2,
    "release": 4,
    "abort": 2,
    "preempt": 4,
    "lookup": 4,
    "lookup_hashed": 2,
    "block_hashes": 1,
    "bad_call": 5,
    "reset": 2,
    "settle": 6,
    "serve": 8,
    "wipe_gpu": 6,
    "drain": 1,
}
NEED_A_REQUEST = {"extend", "commit", "commit_all", "release", "abort", "preempt", "serve"}


class RandomDriver:
    """Makes calls until it is stopped or a check fails.

    Args:
        table: The table under test.
        mode: When copies take effect.
        seed: Decides every call.
        options: As the table was made with, and those of `CheckedTable`.
    """

    def __init__(self, table: Any, mode: CopyMode, seed: int, **options: Any) -> None:
        self.rng = Random(seed)
        self.t = Harness(table, mode, **options)
        self.log: list[str] = []
        """The calls so far, to be read when a check has failed."""
        self._max_live = self.rng.choice([1, 2, 3, 6])
        longest = (table.gpu_blocks + 1) * table.block_size
        trunk = [self.rng.randrange(2) for _ in range(longest)]
        self._documents = [trunk, trunk[: longest // 2] + [2] * longest, [3] * longest]
        self._prompts: list[tuple[list[int], Identity]] = [(trunk, Identity())]
        self._issued: list[int] = []

    def run(self, num_calls: int) -> None:
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        try:
            for kind in self.rng.choices(kinds, weights, k=num_calls):
                with contextlib.suppress(OutOfBlocksError):
                    getattr(self, f"_{self._possible(kind)}")()
            self.t.finish()
        except AssertionError as error:
            error.add_note("The last calls:\n" + "\n".join(self.log[-40:]))
            raise

    def _possible(self, kind: str) -> str:
        """Another kind of call where this one would have nothing to do."""
        if kind in NEED_A_REQUEST and not self.t.book.requests:
            return "admit"
        if kind == "complete" and not self.t.book.tickets:
            return "step"
        return kind

    def _say(self, *words: Any) -> None:
        self.log.append(" ".join(map(str, words)))

    # What the calls are about

    def _prompt(self) -> tuple[list[int], Identity]:
        """The beginning of one of a few documents, now and then with another end or for somebody else."""
        rng, bs = self.rng, self.t.block_size
        if rng.random() < 0.4:
            return self._known_prompt()
        tokens = rng.choice(self._documents)[: rng.randrange(1, self.t.table.gpu_blocks * bs + 2)]
        identity = Identity()
        if rng.random() < 0.2:
            tokens = tokens + rng.choices([0, 1], k=rng.choice([1, bs, 2 * bs]))
        if rng.random() < 0.1:
            media = [(rng.choice(MEDIA_HASHES), rng.randrange(len(tokens))) for _ in range(rng.randrange(3))]
            identity = Identity(rng.choice(SALTS), rng.choice(ADAPTERS), tuple(media))
        self._remember(tokens, identity)
        return tokens, identity

    def _known_prompt(self) -> tuple[list[int], Identity]:
        """An old prompt; one that would be loaded from the Cpu tier, if there is one."""
        loading = []
        for tokens, identity in self._prompts:
            hashes = self.t.promise(tokens, identity)[: (len(tokens) - 1) // self.t.block_size]
            if self.t.book.find(hashes)[1]:
                loading.append((tokens, identity))
        return self.rng.choice(loading or self._prompts)

    def _remember(self, tokens: list[int], identity: Identity) -> None:
        self._prompts = [*self._prompts[-7:], (tokens, identity)]

    def _digests(self, count: int) -> list[bytes]:
        """Digests of a known prompt, or of no prompt; the latter may repeat."""
        if self.rng.random() < 0.6:
            hashes = self.t.promise(*self.rng.choice(self._prompts))
            return (hashes + [bytes([9, n]) * 16 for n in range(count)])[:count]
        names = [bytes([n]) * 32 for n in self.rng.choice([[1], [1, 2], [2, 1], [1, 1, 2], [3, 2, 1]])]
        return (names * count)[:count]

    def _new_name(self) -> Any:
        if len(self.t.book.requests) >= self._max_live:
            return None
        return self.rng.choice([name for name in (*"abcdef", 1, "1") if name not in self.t.book.requests])

    def _live(self) -> Any:
        return self.rng.choice(list(self.t.book.requests.values())) if self.t.book.requests else None

    # Calls

    def _admit(self) -> None:
        name = self._new_name()
        if name is not None:
            tokens, identity = self._prompt()
            self._say("admit", repr(name), tokens, identity)
            self.t.admit(name, tokens, identity)

    def _admit_hashed(self) -> None:
        name = self._new_name()
        if name is not None:
            num_tokens = self.rng.randrange(1, (self.t.table.gpu_blocks + 3) * self.t.block_size // 2 + 1)
            digests = self._digests(num_tokens // self.t.block_size)
            self._say("admit_hashed", repr(name), [digest[:2].hex() for digest in digests], num_tokens)
            self.t.admit_hashed(name, digests, num_tokens)

    def _extend(self) -> None:
        request = self._live()
        num_tokens = self.rng.choice([0, 1, 1, 1, self.t.block_size, self.rng.randrange(9)])
        if request.tokens is None:
            full = (request.num_tokens + num_tokens) // self.t.block_size - len(request.hashes)
            digests = self._digests(full)
            self._say("extend_hashed", repr(request.request_id), [digest[:2].hex() for digest in digests], num_tokens)
            self.t.extend_hashed(request.request_id, digests, num_tokens)
        else:
            tokens = self.rng.choices([0, 1], k=num_tokens)
            self._say("extend", repr(request.request_id), tokens)
            self.t.extend(request.request_id, tokens)
            if self.rng.random() < 0.2:
                self._remember(list(request.tokens), request.identity)

    def _commit(self) -> None:
        request = self._live()
        self._commit_to(request, self.rng.randrange(request.num_tokens + 1))

    def _commit_all(self) -> None:
        request = self._live()
        self._commit_to(request, request.num_tokens)

    def _commit_to(self, request: Any, num_tokens: int) -> None:
        self._say("commit", repr(request.request_id), num_tokens)
        self.t.commit(request.request_id, num_tokens)

    def _step(self) -> None:
        self._planned("step", self.t.step())

    def _get_and_reset_swaps(self) -> None:
        self._planned("get_and_reset_swaps", self.t.get_and_reset_swaps())

    def _planned(self, call: str, plan: Any) -> None:
        self._say(call, "loads", plan.load_ticket, "stores", plan.store_ticket)
        self._issued += [number for number in (plan.load_ticket, plan.store_ticket) if number is not None]

    def _complete(self) -> None:
        """One rank acknowledges one open ticket, in any order, well or badly."""
        number = self.rng.choice(list(self.t.book.tickets))
        acknowledged = self.t.book.tickets[number].acknowledged
        self._acknowledge(number, self.rng.choice([r for r in range(self.t.table.ranks) if r not in acknowledged]), 0.4)

    def _acknowledge(self, number: int, rank: int, fail_chance: float) -> None:
        rng, ticket, failed = self.rng, self.t.book.tickets[number], []
        if rng.random() < fail_chance:
            failed = rng.choices(range(len(ticket.pairs)), k=rng.randrange(1, len(ticket.pairs) + 1))
        self._say("complete", number, rank, failed, ticket.kind, ticket.pairs)
        self.t.complete(number, rank, failed)

    def _complete_again(self) -> None:
        stale = [(number, 0) for number in self._issued if number not in self.t.book.tickets] + [(0, 0), (10**6, 0)]
        stale += [(number, rank) for number, ticket in self.t.book.tickets.items() for rank in ticket.acknowledged]
        number, rank = self.rng.choice(stale)
        self._say("complete", number, rank, "(stale)")
        with contextlib.suppress(StaleTicketError):
            self.t.complete(number, rank)

    def _release(self) -> None:
        self._end("release")

    def _abort(self) -> None:
        self._end("abort")

    def _preempt(self) -> None:
        self._end("preempt")

    def _end(self, call: str) -> None:
        request = self._live()
        self._say(call, repr(request.request_id))
        getattr(self.t, call)(request.request_id)

    def _lookup(self) -> None:
        tokens, identity = self.rng.choice(self._prompts)
        self._say("lookup", tokens, identity)
        self.t.lookup(tokens, identity)

    def _lookup_hashed(self) -> None:
        digests = self._digests(self.rng.randrange(6))
        self._say("lookup_hashed", [digest[:2].hex() for digest in digests])
        self.t.lookup_hashed(digests)

    def _block_hashes(self) -> None:
        tokens, identity = self.rng.choice(self._prompts)
        packed = self.t.table.block_hashes(tokens, identity.salt, identity.adapter, list(identity.media))
        assert packed == b"".join(self.t.promise(tokens, identity))

    def _reset(self) -> None:
        self._say("reset")
        self.t.reset()

    def _settle(self) -> None:
        """A step, and all copies come to an end."""
        self._step()
        for number, ticket in list(self.t.book.tickets.items()):
            for rank in set(range(self.t.table.ranks)) - ticket.acknowledged:
                self._acknowledge(number, rank, 0.1)

    def _serve(self) -> None:
        """One request has all it needs, from its loads to its release."""
        self._settle()
        self._commit_all()
        self._settle()
        self._end("release")

    def _wipe_gpu(self) -> None:
        """A request that takes every Gpu block that nobody holds, and goes."""
        self._say("wipe_gpu")
        available = self.t.stat("gpu_free_blocks") + self.t.stat("gpu_evictable_blocks")
        if available:
            self.t.admit("filler", self.t.unseen(available * self.t.block_size))
            self.t.abort("filler")

    def _drain(self) -> None:
        """Everything comes to an end, and sometimes the Gpu tier is emptied or all is forgotten."""
        self._say("drain")
        self.t.complete_all()
        for request_id in list(self.t.book.requests):
            self.t.release(request_id)
        if self.rng.random() < 0.5:
            self.t.wipe_gpu()
        elif self.rng.random() < 0.3:
            assert self.t.reset()

    def _bad_call(self) -> None:
        """A call that must be refused."""
        rng, request = self.rng, self._live()
        calls: list[tuple[Any, Any]] = [
            (lambda table: table.release("nobody"), UnknownRequestError),
            (lambda table: table.commit(2, 1), UnknownRequestError),
            (lambda table: table.extend("nobody", [1]), UnknownRequestError),
            (lambda table: table.is_ready("nobody"), UnknownRequestError),
            (lambda table: table.admit("new", []), ConfigError),
            (lambda table: table.admit("new", [0, -1]), ConfigError),
            (lambda table: table.admit("new", [2**32]), ConfigError),
            (lambda table: table.admit("new", [0], media=[("x", 1)]), ConfigError),
            (lambda table: table.admit("new", [0], salt=2**127), ConfigError),
            (lambda table: table.admit_hashed("new", [b"short"], self.t.block_size), ConfigError),
            (lambda table: table.admit_hashed("new", [], self.t.block_size), ConfigError),
            (lambda table: table.admit_hashed("new", [], 0), ConfigError),
            (lambda table: table.lookup(["a"]), TypeError),
        ]
        if request is not None:
            name, wrong = request.request_id, "extend_hashed" if request.tokens is not None else "extend"
            calls += [
                (lambda table: table.admit(name, [0]), ConfigError),
                (lambda table: table.commit(name, request.num_tokens + 1), ConfigError),
                (lambda table: table.commit(name, -1), ConfigError),
                (
                    lambda table: getattr(table, wrong)(name, [], *([0] if wrong == "extend_hashed" else [])),
                    ConfigError,
                ),
            ]
        for number, ticket in self.t.book.tickets.items():
            open_rank = next(rank for rank in range(self.t.table.ranks) if rank not in ticket.acknowledged)
            num_pairs = len(ticket.pairs)
            calls += [
                (lambda table, at=number: table.complete(at, self.t.table.ranks), ConfigError),
                (lambda table, at=number, r=open_rank, n=num_pairs: table.complete(at, r, [0, n]), ConfigError),
            ]
        call, error = rng.choice(calls)
        self._say("a bad call,", error.__name__)
        self.t.refuses(call, error)
