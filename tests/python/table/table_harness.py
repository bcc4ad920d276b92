"""The words of the scenarios (open, done, full, wipe_gpu, …) on top of a checked table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from checked_table import CheckedTable
from expected_hashes import PLAIN, Identity
from kvtier.errors import OutOfBlocksError, StaleTicketError, UnknownRequestError


def span(first: int, last: int) -> list[int]:
    """The tokens `first..last`, inclusive, as the scenarios write them."""
    return list(range(first, last + 1))


class Harness(CheckedTable):
    """A checked table with the words of the scenarios."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unseen = count(10**6)
        self._names = count()

    def unseen(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt has."""
        return [next(self._unseen) for _ in range(num_tokens)]

    def open(self, request_id: Any, tokens: Sequence[int], identity: Identity = PLAIN) -> Any:
        return self.admit(request_id, tokens, identity)

    def open_is_refused(self, request_id: Any, tokens: Sequence[int]) -> OutOfBlocksError:
        try:
            self.admit(request_id, tokens)
        except OutOfBlocksError as error:
            return error
        raise AssertionError("admitted, but must be refused")

    def hits(self, request_id: Any, tokens: Sequence[int], identity: Identity = PLAIN) -> tuple[int, int, int]:
        """Opens a request; its blocks that are on the Gpu, on the host, fresh."""
        admission = self.open(request_id, tokens, identity)
        return admission.gpu_hit_blocks, admission.cpu_hit_blocks, admission.fresh_blocks

    def done(self, plan: Any, fail: bool = False) -> None:
        """All copies of a plan finished, or all failed."""
        for number, pairs in ((plan.load_ticket, plan.loads), (plan.store_ticket, plan.stores)):
            if number is not None:
                for rank in range(self.table.ranks):
                    self.complete(number, rank, range(len(pairs)) if fail else ())

    def complete_all(self) -> None:
        """Every open ticket is acknowledged by the ranks that have not done so."""
        for number, ticket in list(self.book.tickets.items()):
            for rank in set(range(self.table.ranks)) - ticket.acknowledged:
                self.complete(number, rank)

    def done_again(self, number: int) -> None:
        """A late acknowledgement of a finished ticket, which must change nothing."""
        try:
            self.complete(number)
        except StaleTicketError:
            return
        raise AssertionError("a finished ticket was acknowledged again")

    def is_unknown(self, call: str, request_id: Any, *args: Any) -> None:
        self.refuses(lambda table: getattr(table, call)(request_id, *args), UnknownRequestError)

    def cycle(self) -> Any:
        """A step whose copies finish at once."""
        plan = self.step()
        self.done(plan)
        return plan

    def full(self, tokens: Sequence[int], identity: Identity = PLAIN) -> Any:
        """A request from its admission to its release; the plan of its stores."""
        name = f"full {next(self._names)}"
        self.open(name, tokens, identity)
        self.cycle()
        self.commit(name, len(tokens))
        plan = self.cycle()
        self.release(name)
        return plan

    def wipe_gpu(self) -> None:
        """Evict every cached Gpu block."""
        name = f"filler {next(self._names)}"
        self.open(name, self.unseen(self.table.gpu_blocks * self.block_size))
        self.abort(name)
        assert self.stat("gpu_free_blocks") == self.table.gpu_blocks

    def stat(self, name: str) -> int:
        return self.table.stats()[name]

    def cells(self, tier: str, block_ids: Sequence[int]) -> list[Any]:
        return [self.memory.cells[tier][block_id] for block_id in block_ids]

    def content(self, tokens: Sequence[int], identity: Identity = PLAIN) -> list[Any]:
        """What the full blocks of these tokens must hold."""
        return [self.prints[name] for name in self.promise(tokens, identity)]

    def events_of(self, kind: str, tier: str) -> int:
        return sum(event[:2] == (kind, tier) for event in self.events)

    def finish(self) -> None:
        """O3: once nobody uses the table, one request can have all Gpu blocks, and nothing is held on the host."""
        self.complete_all()
        for request_id in list(self.book.requests):
            self.abort(request_id)
        self.wipe_gpu()
        assert self.stat("cpu_held_blocks") == 0
