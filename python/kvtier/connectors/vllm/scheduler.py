"""The scheduler's side: what to load and what to store."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier._core import HostTable
from kvtier.connectors.vllm.costs import Costs
from kvtier.connectors.vllm.metadata import Acknowledgements, Copied, Load, StepPlan
from kvtier.connectors.vllm.stores import Progress, Stores

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.connectors.vllm.events import KvEvents
    from kvtier.connectors.vllm.options import Options

__all__ = ["SchedulerSide"]

_MAX_HISTORY_BLOCKS = 2**22
TALLIES = (
    "prompt_tokens",
    "gpu_hit_tokens",
    "host_hit_tokens",
    "skipped_short_tokens",
    "skipped_compute_tokens",
    "num_joined",
    "num_deferred",
    "num_same_step_loads",
)
"""What the scheduler's side counts itself, for its statistics."""


@dataclass
class _Found:
    """What the last lookup of a request found, until vLLM has allocated blocks for it."""

    start: int
    num_prompt_tokens: int
    is_same_step: bool = False
    skipped: str | None = None
    num_skipped_tokens: int = 0


@dataclass
class _Live(Progress):
    """A request that vLLM has told us of."""

    found: _Found | None = None
    waits_for: str | None = None


@dataclass
class _OpenLoad:
    request_id: str
    gpu_ids: list[int]
    is_same_step: bool


class SchedulerSide:
    """Tables and holds of the scheduler's process.

    Args:
        options: The user's options.
        block_size: Tokens per block.
        num_cpu_blocks: Slots of the Cpu tier.
        ranks: Workers that acknowledge each ticket.
        block_bytes: Bytes of a block on one rank.
        lazy_window: Blocks at the head of vLLM's free queue that the lazy mode looks at.
        can_wait_in_step: Whether steps follow one another, so that a load within a step can fail without another step
            having been planned on it.
        events: Where KV events go; None: they are not wanted.
        clock: Seconds, growing.

    Raises:
        ConfigError: A budget does not hold one block.
    """

    def __init__(
        self,
        options: Options,
        block_size: int,
        num_cpu_blocks: int,
        ranks: int,
        block_bytes: int,
        lazy_window: int = 64,
        can_wait_in_step: bool = True,
        events: KvEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.block_size = block_size
        history = min(4 * num_cpu_blocks + 4096, _MAX_HISTORY_BLOCKS) if options.store_mode == "second_use" else 0
        self.table = HostTable(num_cpu_blocks, ranks, history)
        max_store_blocks = options.step_blocks("max_store_bytes_per_step", block_bytes)
        self._max_load_blocks = options.step_blocks("max_load_bytes_per_step", block_bytes)
        self.stores = Stores(self.table, options.store_mode, block_size, max_store_blocks, lazy_window)
        self.costs = Costs(block_bytes, block_size, options.copy_threads, clock)
        self.events = events
        self.stores.keeps_origins = events is not None
        self.is_dead = False
        self._can_wait_in_step = can_wait_in_step and options.same_step_loads
        self._tally: Counter[str] = Counter()
        self._copied = Copied()
        self._queue_depth = 0
        self._live: dict[str, _Live] = {}
        self._loads: list[Load] = []
        self._num_planned_blocks = 0
        self._open_loads: dict[int, _OpenLoad] = {}
        self._num_open_blocks = 0
        self._running: frozenset[str] = frozenset()
        self._step = 0
        self._known_step = 0
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """Take the pool of Gpu blocks, through which the sources of stores are held."""
        self._pool = pool
        self.stores.bind(pool)

    def add(self, request: Any) -> None:
        """Take note of a new request."""
        self._live[request.request_id] = _Live(request)

    def drop(self, request_id: str) -> None:
        """Forget a request; its loads and stores under way go on."""
        self._live.pop(request_id, None)

    def find(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones can be loaded, and whether beside the steps.

        None instead of a number: ask again, another request is loading them, or this step's budget is used up.
        """
        live = self._live.get(request.request_id)
        if live is None:
            return 0, False
        start = num_computed_tokens // self.block_size
        found = live.found = _Found(start, request.num_tokens)
        if self.is_dead or request.skip_reading_prefix_cache or num_computed_tokens % self.block_size:
            return 0, False
        # One token is always left to compute.
        digests = request.block_hashes[start : (request.num_tokens - 1) // self.block_size]
        if not digests:
            return 0, False
        num_blocks, is_loading = self.table.lookup(b"".join(digests))
        if is_loading:
            return self._wait(live, "num_joined")
        if not num_blocks:
            return 0, False
        num_tokens = num_blocks * self.block_size
        if num_tokens < self.options.min_hit_tokens:
            found.skipped, found.num_skipped_tokens = "skipped_short_tokens", num_tokens
            return 0, False
        if self.options.load_choice == "measured" and self.costs.is_cheaper_to_compute(
            num_blocks, self._num_open_blocks
        ):
            found.skipped, found.num_skipped_tokens = "skipped_compute_tokens", num_tokens
            return 0, False
        planned, most = self._num_planned_blocks, self._max_load_blocks
        if most is not None and planned and planned + num_blocks > most:
            return self._wait(live, "num_deferred")
        if self._can_wait_in_step:
            num_others = len(self._running - {request.request_id})
            found.is_same_step = self.costs.fits_same_step(num_blocks, self._num_open_blocks, num_others)
        return num_tokens, not found.is_same_step

    def _wait(self, live: _Live, reason: str) -> tuple[None, bool]:
        if live.waits_for != reason:
            live.waits_for = reason
            self._tally[reason] += 1
        return None, False

    def plan_load(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Plan the load of a hit to the blocks that vLLM has given to the request."""
        live = self._live.get(request.request_id)
        # vLLM calls again once a load has ended, without having asked again.
        if live is None or live.found is None:
            return
        found, live.found, live.waits_for = live.found, None, None
        self._tally["prompt_tokens"] += found.num_prompt_tokens
        self._tally["gpu_hit_tokens"] += found.start * self.block_size
        self._tally["host_hit_tokens"] += num_tokens
        if found.skipped is not None:
            self._tally[found.skipped] += found.num_skipped_tokens
        # What was offered for it before a preemption may have left the tier since.
        live.num_offered_blocks = 0
        if not num_tokens:
            return
        start, end = found.start, found.start + num_tokens // self.block_size
        gpu_ids = blocks.get_block_ids()[0][start:end]
        plan = self.table.load(b"".join(request.block_hashes[start:end]), gpu_ids)
        if plan is None:
            import numpy as np

            lost = np.asarray([(0, gpu_id) for gpu_id in gpu_ids], np.int32).reshape(-1, 2)
            self._loads.append(Load(request.request_id, None, lost, found.is_same_step))
            return
        self._tally["num_same_step_loads"] += found.is_same_step
        self._loads.append(Load(request.request_id, *plan, found.is_same_step))
        self._open_loads[plan[0]] = _OpenLoad(request.request_id, gpu_ids, found.is_same_step)
        self._num_planned_blocks += len(gpu_ids)
        self._num_open_blocks += len(gpu_ids)

    def plan_step(self, output: Any) -> StepPlan:
        """The copies that begin with a step."""
        self._step += 1
        num_tokens = output.total_num_scheduled_tokens
        plan = StepPlan(self._step, self._known_step, self._loads, is_idle=num_tokens == 0)
        self._running = frozenset(output.num_scheduled_tokens)
        is_pure = not any(load.is_same_step for load in self._loads)
        self.costs.begin_step(self._step, num_tokens, len(self._running), is_pure)
        self._loads, self._num_planned_blocks = [], 0
        if not self.is_dead:
            origins = self.stores.plan(output, self._live, plan)
            if self.events is not None and plan.store_ticket is not None:
                self.events.expect(plan.store_ticket, plan.stores, origins)
        return plan

    def take(self, acknowledgements: Acknowledgements) -> bool:
        """Carry acknowledgements into the table; true if a copy engine has been found dead by this."""
        self._known_step = max(self._known_step, acknowledgements.step)
        self.costs.end_step(acknowledgements.step)
        self.costs.observe(acknowledgements.copied)
        self._copied += acknowledgements.copied
        self._queue_depth = acknowledgements.queue_depth
        for ticket, rank, failed in acknowledgements.finished:
            load = self._open_loads.get(ticket)
            if failed and load is not None:
                self._recover(load, failed)
            if not self.table.complete(ticket, rank, failed):
                continue
            if load is not None:
                del self._open_loads[ticket]
                self._num_open_blocks -= len(load.gpu_ids)
            self.stores.end(ticket)
            if self.events is not None:
                self.events.collect(ticket, self.table.events())
        newly_dead = bool(acknowledgements.dead_ranks) and not self.is_dead
        self.is_dead |= bool(acknowledgements.dead_ranks)
        return newly_dead

    def _recover(self, load: _OpenLoad, failed: list[int]) -> None:
        """After a failed load: what is computed instead is offered again, and nobody else finds the blocks before."""
        live = self._live.get(load.request_id)
        if live is not None:
            live.num_offered_blocks = 0
        if load.is_same_step:
            # vLLM has them in its prefix cache already, as a request of the step had them.
            self._pool.evict_blocks({load.gpu_ids[index] for index in failed})

    @property
    def has_open_tickets(self) -> bool:
        """Whether a copy is under way."""
        return self.stores.are_open or bool(self._open_loads)

    @property
    def has_open_stores(self) -> bool:
        """Whether Gpu blocks are held for stores, and will be let go without a preemption."""
        return self.stores.are_open

    def reset(self) -> bool:
        """Forget every block of the Cpu tier, and what is being stored; false while a load is under way."""
        if not self.table.reset():
            return False
        for live in self._live.values():
            live.num_offered_blocks = live.num_noted_blocks = 0
        if self.events is not None:
            self.events.collect(None, self.table.events())
        return True

    def stats(self) -> dict[str, int | float]:
        """Counters since construction and gauges of now, by name."""
        named: dict[str, int | float] = dict(self.table.stats())
        named.update((name, self._tally[name]) for name in TALLIES)
        named.update(vars(self._copied))
        named.update(queue_depth=self._queue_depth, is_without_tier=int(self.is_dead))
        return named
