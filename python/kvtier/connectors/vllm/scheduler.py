"""The scheduler's side: what to load, what to store, and what it keeps from being reused meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier._core import HostTable
from kvtier.connectors.vllm.metadata import Acknowledgements, Load, StepPlan

if TYPE_CHECKING:
    from kvtier.connectors.vllm.options import Options

__all__ = ["SchedulerSide"]


@dataclass
class _Live:
    """A request that vLLM has told us of."""

    request: Any
    num_offered_blocks: int = 0
    """Leading blocks that were offered for storing, or found in the tier."""
    hit_start: int = 0
    """First block of the last hit found."""


@dataclass
class SchedulerSide:
    """Tables and holds of the scheduler's process.

    Args:
        options: The user's options.
        block_size: Tokens per block.
        num_cpu_blocks: Slots of the Cpu tier.
        ranks: Workers that acknowledge each ticket.
    """

    options: Options
    block_size: int
    num_cpu_blocks: int
    ranks: int
    table: HostTable = field(init=False)
    is_dead: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.table = HostTable(self.num_cpu_blocks, self.ranks)
        self._live: dict[str, _Live] = {}
        self._loads: list[Load] = []
        self._sources: dict[int, list[Any]] = {}
        self._load_tickets: dict[int, str] = {}
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """Take the pool of Gpu blocks, through which the sources of stores are held."""
        self._pool = pool

    def add(self, request: Any) -> None:
        """Take note of a new request."""
        self._live[request.request_id] = _Live(request)

    def drop(self, request_id: str) -> None:
        """Forget a request; its loads and stores under way go on."""
        self._live.pop(request_id, None)

    def find(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones can be loaded; None while another request is loading them."""
        live = self._live.get(request.request_id)
        if live is None or self.is_dead or request.skip_reading_prefix_cache or num_computed_tokens % self.block_size:
            return 0, False
        live.hit_start = num_computed_tokens // self.block_size
        # One token is always left to compute.
        digests = request.block_hashes[live.hit_start : (request.num_tokens - 1) // self.block_size]
        if not digests:
            return 0, False
        num_blocks, is_loading = self.table.lookup(b"".join(digests))
        if not num_blocks:
            return (None, False) if is_loading else (0, False)
        num_tokens = num_blocks * self.block_size
        return (num_tokens, True) if num_tokens >= self.options.min_hit_tokens else (0, False)

    def plan_load(self, request: Any, blocks: Any, num_tokens: int) -> None:
        """Plan the load of a hit to the blocks that vLLM has given to the request."""
        live = self._live.get(request.request_id)
        if live is None or not num_tokens:
            return
        start, end = live.hit_start, live.hit_start + num_tokens // self.block_size
        gpu_ids = blocks.get_block_ids()[0][start:end]
        plan = self.table.load(b"".join(request.block_hashes[start:end]), gpu_ids)
        # Where the load fails, what is computed instead has to be offered again.
        live.num_offered_blocks = 0
        if plan is None:
            import numpy as np

            lost = np.asarray([(0, gpu_id) for gpu_id in gpu_ids], np.int32).reshape(-1, 2)
            self._loads.append(Load(request.request_id, None, lost))
            return
        self._loads.append(Load(request.request_id, *plan))
        self._load_tickets[plan[0]] = request.request_id

    def plan_step(self, output: Any) -> StepPlan:
        """The copies that begin with a step."""
        plan = StepPlan(loads=self._loads, is_idle=output.total_num_scheduled_tokens == 0)
        self._loads = []
        if not self.is_dead:
            self._plan_stores(output, plan)
        return plan

    def _plan_stores(self, output: Any, plan: StepPlan) -> None:
        digests: list[bytes] = []
        gpu_ids: list[int] = []
        offered: list[tuple[_Live, int]] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            request = live.request
            # What this step writes is stored after it; tokens that are only guessed have no block hash.
            written = (request.num_computed_tokens + num_tokens) // self.block_size
            end, start = min(written, len(request.block_hashes)), live.num_offered_blocks
            if end <= start:
                continue
            blocks = output.kv_connector_block_state.get_block_ids(request_id)
            if blocks is None:
                continue
            end = min(end, len(blocks[0]))
            digests += request.block_hashes[start:end]
            gpu_ids += blocks[0][start:end]
            offered.append((live, end))
        if not digests:
            return
        ticket, stores = self.table.offer(b"".join(digests), gpu_ids, self.options.max_store_blocks_per_step)
        budget = self.options.max_store_blocks_per_step
        if budget is None or len(stores) < budget:
            for live, end in offered:
                live.num_offered_blocks = end
        if ticket is None:
            return
        sources = [self._pool.blocks[gpu_id] for gpu_id in stores[:, 0].tolist()]
        self._pool.touch(sources)
        self._sources[ticket] = sources
        plan.store_ticket, plan.stores = ticket, stores

    def take(self, acknowledgements: Acknowledgements) -> bool:
        """Carry acknowledgements into the table; true if a copy engine has been found dead by this."""
        for ticket, rank, failed in acknowledgements.finished:
            if failed and (live := self._live.get(self._load_tickets.get(ticket, ""))) is not None:
                live.num_offered_blocks = 0
            if not self.table.complete(ticket, rank, failed):
                continue
            self._load_tickets.pop(ticket, None)
            sources = self._sources.pop(ticket, None)
            if sources:
                # Tail first, as vLLM frees a request's blocks.
                self._pool.free_blocks(reversed(sources))
        newly_dead = bool(acknowledgements.dead_ranks) and not self.is_dead
        self.is_dead |= bool(acknowledgements.dead_ranks)
        return newly_dead

    @property
    def has_open_tickets(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._sources or self._load_tickets)

    @property
    def has_open_stores(self) -> bool:
        """Whether Gpu blocks are held for stores, and will be let go without a preemption."""
        return bool(self._sources)

    def reset(self) -> bool:
        """Forget every block of the Cpu tier; false while a copy is under way."""
        done = self.table.reset()
        if done:
            for live in self._live.values():
                live.num_offered_blocks = 0
        return done
