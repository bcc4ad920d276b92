"""A copier for tests: acknowledges late, fails pairs, refuses plans, or spoils what it copies."""

from __future__ import annotations

from collections.abc import Callable

from kvtier import Plan
from kvtier.engine import KvMemory, TorchCopyEngine
from kvtier.errors import TransferError

Fails = Callable[[str, int], bool]


class ScriptedCopier(TorchCopyEngine):
    """Copies at the acknowledgement (late) or at `submit`, and lets a script decide which pairs fail.

    `fails(side, index)` with side "load" or "store" says whether a pair fails: its destination is filled with junk.
    """

    def __init__(
        self, memory: KvMemory, cpu_blocks: int, *, delay: int = 0, late: bool = False, fails: Fails | None = None
    ) -> None:
        super().__init__(memory.tensor, cpu_blocks)
        self.delay = delay  # calls of `poll` that find a ticket unfinished
        self.late = late
        self.fails = fails or (lambda side, index: False)
        self.refuse_next = 0  # plans to refuse, as an engine whose queue is full does
        self.stuck = False
        self.pending: list[tuple[int, Plan, dict[int, list[int]]]] = []
        self.plans: list[Plan] = []

    def submit(self, plan: Plan) -> None:
        if self.refuse_next:
            self.refuse_next -= 1
            raise TransferError("refused by the script")
        self.plans.append(plan)
        failed = {}
        for side, ticket, pairs in (("load", plan.load_ticket, plan.loads), ("store", plan.store_ticket, plan.stores)):
            if ticket is not None:
                failed[ticket] = [index for index in range(len(pairs)) if self.fails(side, index)]
        if not self.late:
            self._move(plan, failed)
        self.pending.append((self.delay, plan, failed))

    def poll(self) -> list[tuple[int, list[int]]]:
        done: list[tuple[int, list[int]]] = []
        waiting = []
        for delay, plan, failed in self.pending:
            if delay > 0 or self.stuck:
                waiting.append((delay - 1, plan, failed))
                continue
            if self.late:
                self._move(plan, failed)
            done += failed.items()
        self.pending = waiting
        return done

    def wait(self, timeout_s: float) -> list[tuple[int, list[int]]]:
        self.pending = [(0, plan, failed) for _, plan, failed in self.pending]
        return self.poll()

    def _move(self, plan: Plan, failed: dict[int, list[int]]) -> None:
        super().submit(plan)
        super().poll()
        for index in failed.get(plan.load_ticket or 0, ()):
            self._gpu[plan.loads[index, 1]] = float("nan")
        for index in failed.get(plan.store_ticket or 0, ()):
            self._host[plan.stores[index, 1]] = float("nan")
