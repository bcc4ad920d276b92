"""What loading and what computing costs, as measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.connectors.vllm.metadata import Copied

__all__ = ["Costs", "Rate"]

_KEEP = 0.8
_MIN_PREFILL_TOKENS = 64
_SAME_STEP_LIMIT_S = 0.1
_REMEASURE_EVERY = 16


@dataclass
class Rate:
    """An amount per second, in which each new measurement makes the older ones count for less."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take a measurement; one without time or amount says nothing."""
        if amount > 0 and seconds > 0:
            self.amount = self.amount * _KEEP + amount
            self.seconds = self.seconds * _KEEP + seconds

    @property
    def per_second(self) -> float | None:
        """The rate; None before the first measurement."""
        return self.amount / self.seconds if self.seconds else None


@dataclass
class Costs:
    """Measured costs of loading and computing, and what follows from them. Before it is measured, nothing follows.

    Args:
        block_bytes: Bytes of a block on one rank.
        block_size: Tokens per block.
        copy_threads: Threads that copy, per rank.
        clock: Seconds, growing.
    """

    block_bytes: int
    block_size: int
    copy_threads: int
    clock: Callable[[], float] = time.monotonic
    loads: Rate = field(default_factory=Rate, init=False)
    stores: Rate = field(default_factory=Rate, init=False)
    prefill: Rate = field(default_factory=Rate, init=False)
    steps: Rate = field(default_factory=Rate, init=False)

    def __post_init__(self) -> None:
        self._begun: dict[int, tuple[float, int, int, bool]] = {}
        self._last_end = float("-inf")
        self._num_refused = 0

    def begin_step(self, step: int, num_tokens: int, num_requests: int, is_pure: bool) -> None:
        """Note the beginning of a step.

        Args:
            step: Its number.
            num_tokens: Tokens that it computes.
            num_requests: Requests that they belong to.
            is_pure: Whether it only computes; a step that waits for loads measures nothing.
        """
        self._begun[step] = (self.clock(), num_tokens, num_requests, is_pure)

    def end_step(self, step: int) -> None:
        """Note the end of a step. Of steps that overlap, each is charged what it took after the one before."""
        now = self.clock()
        for earlier in [number for number in self._begun if number < step]:
            del self._begun[earlier]
        begin, num_tokens, num_requests, is_pure = self._begun.pop(step, (now, 0, 0, False))
        seconds = now - max(begin, self._last_end)
        self._last_end = now
        if not is_pure or not num_tokens:
            return
        self.steps.add(1, seconds)
        # Steps that mostly decode say nothing about prefill.
        if num_tokens >= max(_MIN_PREFILL_TOKENS, 8 * num_requests):
            self.prefill.add(num_tokens, seconds)

    def observe(self, copied: Copied) -> None:
        """Take what the copy threads report. Each rank copies its own part of a block at the same time."""
        self.loads.add(copied.load_bytes, copied.load_seconds)
        self.stores.add(copied.store_bytes, copied.store_seconds)

    def load_seconds(self, num_blocks: int) -> float | None:
        """How long loading takes; before any load, how long storing as much would take. None: not known."""
        rate = self.loads.per_second or self.stores.per_second
        return num_blocks * self.block_bytes / (rate * self.copy_threads) if rate else None

    def compute_seconds(self, num_blocks: int) -> float | None:
        """How long computing takes; None: not known."""
        rate = self.prefill.per_second
        return num_blocks * self.block_size / rate if rate else None

    def is_cheaper_to_compute(self, num_blocks: int, num_blocks_ahead: int) -> bool:
        """Whether a prefix is computed sooner than loaded.

        One of 16 that seem so is loaded all the same: the bandwidth would otherwise never be measured again.

        Args:
            num_blocks: Blocks of the prefix.
            num_blocks_ahead: Blocks whose loads have begun before and have not ended.
        """
        load, compute = self.load_seconds(num_blocks + num_blocks_ahead), self.compute_seconds(num_blocks)
        if load is None or compute is None or load <= compute:
            return False
        self._num_refused += 1
        return self._num_refused % _REMEASURE_EVERY != 0

    def fits_same_step(self, num_blocks: int, num_blocks_ahead: int, num_others: int) -> bool:
        """Whether a step should wait for a load rather than the request for another step.

        Waiting delays every request of the step by the load; not waiting delays this one by a step. With no others
        there is nothing to delay, up to a tenth of a second, in which no new request could begin.

        Args:
            num_blocks: Blocks of the prefix.
            num_blocks_ahead: Blocks whose loads have begun before and have not ended.
            num_others: Other requests of the step.
        """
        load = self.load_seconds(num_blocks + num_blocks_ahead)
        if load is None or load > _SAME_STEP_LIMIT_S:
            return False
        if num_others == 0:
            return True
        steps = self.steps.per_second
        return steps is not None and load * (num_others + 1) <= 1 / steps
