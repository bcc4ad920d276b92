"""Which blocks are stored when, and the holds that keep their sources from being reused meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtier._core import HostTable
    from kvtier.connectors.vllm.metadata import StepPlan

__all__ = ["Progress", "Stores"]

_DIGEST_BYTES = 32


@dataclass
class Progress:
    """How far the blocks of a request have been offered.

    Attributes:
        request: vLLM's request.
        num_offered_blocks: Leading blocks that were offered.
        num_noted_blocks: Leading blocks whose use by this request was noted.
    """

    request: Any
    num_offered_blocks: int = 0
    num_noted_blocks: int = 0


class Stores:
    """Plans stores and holds their sources through vLLM's block pool.

    Args:
        table: The table.
        mode: `eager`, `lazy` or `second_use`.
        block_size: Tokens per block.
        max_blocks: Most blocks that one step begins to store; None: no limit.
        lazy_window: Blocks at the head of vLLM's free queue that the lazy mode looks at; what two steps can take.
    """

    def __init__(self, table: HostTable, mode: str, block_size: int, max_blocks: int | None, lazy_window: int) -> None:
        self._table = table
        self._mode = mode
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._lazy_window = lazy_window
        self.keeps_origins = False
        self._pool: Any = None
        self._sources: dict[int, list[Any]] = {}

    def bind(self, pool: Any) -> None:
        """Take vLLM's pool of Gpu blocks."""
        self._pool = pool
        self._lazy_window = min(self._lazy_window, max(1, pool.num_gpu_blocks // 2))

    @property
    def are_open(self) -> bool:
        """Whether sources are held."""
        return bool(self._sources)

    def plan(self, output: Any, live: Mapping[str, Progress], plan: StepPlan) -> dict[int, tuple[Any, int]]:
        """Plan the stores that follow a step, and hold their sources.

        Args:
            output: vLLM's `SchedulerOutput`.
            live: Requests by id.
            plan: The step's plan; the stores are put into it.

        Returns:
            Where offered blocks come from, if `keeps_origins`: Gpu block id -> (request, index of the block in it).
            Empty in lazy mode, which no longer knows.
        """
        origins: dict[int, tuple[Any, int]] = {}
        if self._mode == "lazy":
            # A step without tokens takes no blocks, so nothing is about to be reused.
            digests, gpu_ids = self._victims() if output.total_num_scheduled_tokens else ([], [])
            offered: list[tuple[Progress, int]] = []
        else:
            digests, gpu_ids, offered = self._filled(output, live, origins)
        if not digests:
            return origins
        only_repeated = self._mode == "second_use"
        ticket, stores = self._table.offer(b"".join(digests), gpu_ids, self._max_blocks, only_repeated)
        if self._max_blocks is None or len(stores) < self._max_blocks:
            for progress, end in offered:
                progress.num_offered_blocks = end
        if ticket is not None:
            sources = [self._pool.blocks[gpu_id] for gpu_id in stores[:, 0].tolist()]
            self._pool.touch(sources)
            self._sources[ticket] = sources
            plan.store_ticket, plan.stores = ticket, stores
        return origins

    def _filled(
        self, output: Any, live: Mapping[str, Progress], origins: dict[int, tuple[Any, int]]
    ) -> tuple[list[bytes], list[int], list[tuple[Progress, int]]]:
        """What the step's requests have, or will have after it, and have not offered."""
        digests: list[bytes] = []
        gpu_ids: list[int] = []
        offered: list[tuple[Progress, int]] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            progress = live.get(request_id)
            if progress is None:
                continue
            request = progress.request
            # What this step writes is stored after it; tokens that are only guessed have no block hash.
            written = (request.num_computed_tokens + num_tokens) // self._block_size
            end, start = min(written, len(request.block_hashes)), progress.num_offered_blocks
            if end <= start:
                continue
            blocks = output.kv_connector_block_state.get_block_ids(request_id)
            if blocks is None:
                continue
            end = min(end, len(blocks[0]))
            if self._mode == "second_use" and end > progress.num_noted_blocks:
                # Once per request: offering again for the budget's sake is no second use.
                self._table.note_use(b"".join(request.block_hashes[progress.num_noted_blocks : end]))
                progress.num_noted_blocks = end
            digests += request.block_hashes[start:end]
            gpu_ids += blocks[0][start:end]
            if self.keeps_origins:
                origins.update((blocks[0][at], (request, at)) for at in range(start, end))
            offered.append((progress, end))
        return digests, gpu_ids, offered

    def _victims(self) -> tuple[list[bytes], list[int]]:
        """Blocks that vLLM reuses next, in its order."""
        digests: list[bytes] = []
        gpu_ids: list[int] = []
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(self._lazy_window):
            if block is None or block.next_free_block is None:  # the end of the queue
                break
            num_tokens = getattr(block, "block_hash_num_tokens", None)
            is_whole = num_tokens is None or num_tokens % self._block_size == 0
            if block.block_hash is not None and not block.is_null and is_whole:
                # The rest of vLLM's key is the number of the group; there is one.
                digests.append(block.block_hash[:_DIGEST_BYTES])
                gpu_ids.append(block.block_id)
            block = block.next_free_block
        return digests, gpu_ids

    def end(self, ticket: int) -> None:
        """Let the sources of a ticket go, if it is one of ours."""
        sources = self._sources.pop(ticket, None)
        if sources is None:
            return
        if self._mode == "lazy":
            self._pool.free_blocks(sources)
            self._put_first(sources)
        else:
            # Tail first, as vLLM frees a request's blocks.
            self._pool.free_blocks(reversed(sources))

    def _put_first(self, blocks: Iterable[Any]) -> None:
        """Give victims back their place: they are safe now, and holding them was no use of them."""
        queue = self._pool.free_block_queue
        idle = [block for block in blocks if block.ref_cnt == 0 and block.block_hash is not None]
        for block in idle:
            queue.remove(block)
        queue.prepend_n(idle)
