"""The block table of the twin: checks arguments, computes hashes, and lets `Blocks` decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from kvtier.errors import ConfigError, StaleTicketError, UnknownRequestError
from kvtier.reference import arguments, hashing
from kvtier.reference.audit import audit
from kvtier.reference.blocks import Blocks
from kvtier.reference.request import Request
from kvtier.reference.results import Admission, Event, Plan, Swaps, id_array, pair_array

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    TokenIds = Sequence[int] | Buffer
    Digests = Sequence[bytes] | Buffer
    RequestId = str | int

Identity = hashing.Identity
Adapter = hashing.Adapter
MediaItem = hashing.MediaItem


class ReferenceBlockTable:
    """The block allocator of an engine, with a Gpu tier and a Cpu tier; see `kvtier.BlockTable` for every call.

    Args and errors are the same, call by call.
    """

    def __init__(
        self,
        gpu_blocks: int,
        cpu_blocks: int,
        block_size: int,
        policy: str = "lru",
        store: str = "eager",
        max_store_blocks_per_step: int | None = None,
        ranks: int = 1,
        hash: str = "sha256",
        root: bytes = b"",
    ) -> None:
        self._gpu_blocks = arguments.integer("gpu_blocks", gpu_blocks, 1, 2**24)
        self._cpu_blocks = arguments.integer("cpu_blocks", cpu_blocks, 0, 2**24)
        self._block_size = arguments.integer("block_size", block_size, 1, 65536)
        arguments.choice("policy", policy, ["lru"])
        arguments.choice("store", store, ["eager"])
        limit = max_store_blocks_per_step
        if limit is not None:
            limit = arguments.integer("max_store_blocks_per_step", limit, 0, arguments.MAX_COUNT)
        self._ranks = arguments.integer("ranks", ranks, 1, 32)
        arguments.choice("hash", hash, ["sha256", "xxh3"])
        if not isinstance(root, bytes):
            raise TypeError(f"root must be bytes, not {type(root).__name__}")
        self._hash = hash
        self._root = hashing.root_hash(self._block_size, root, hash)
        self._blocks = Blocks(self._gpu_blocks, self._cpu_blocks, self._block_size, limit, self._ranks)

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the Gpu tier."""
        return self._gpu_blocks

    @property
    def cpu_blocks(self) -> int:
        """Blocks of the Cpu tier."""
        return self._cpu_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def ranks(self) -> int:
        """Workers that must acknowledge each ticket."""
        return self._ranks

    def admit(
        self,
        request_id: RequestId,
        token_ids: TokenIds,
        salt: Identity | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Admission:
        """Hold the longest usable prefix and reserve Gpu blocks for all tokens; or change nothing."""
        key = arguments.request_id(request_id)
        tokens = arguments.token_ids(token_ids)
        if not tokens:
            raise ConfigError("token_ids", "no tokens", "must be at least one")
        chain, hashes = self._chain(tokens, salt, adapter, media)
        return self._admit(key, len(tokens), chain, hashes)

    def admit_hashed(self, request_id: RequestId, digests: Digests, num_tokens: int) -> Admission:
        """As `admit`, with the hashes of the full blocks given."""
        key = arguments.request_id(request_id)
        hashes = arguments.digests(digests)
        count = arguments.integer("num_tokens", num_tokens, 1, arguments.MAX_COUNT)
        arguments.digest_count(hashes, count // self._block_size)
        return self._admit(key, count, None, hashes)

    def _admit(self, key: RequestId, num_tokens: int, chain: hashing.Chain, hashes: list[bytes]) -> Admission:
        if key in self._blocks.requests:
            raise ConfigError("request_id", repr(key), "must not be in use by a live request")
        request = self._blocks.admit(key, num_tokens, chain, hashes)
        hits = request.gpu_hits + request.cpu_hits
        return Admission(
            block_ids=id_array(request.block_ids),
            gpu_hit_blocks=request.gpu_hits,
            cpu_hit_blocks=request.cpu_hits,
            fresh_blocks=len(request.block_ids) - hits,
            cached_tokens=hits * self._block_size,
        )

    def extend(self, request_id: RequestId, token_ids: TokenIds) -> npt.NDArray[np.int32]:
        """Add tokens at the end of a request that was admitted with `admit`."""
        request = self._request(request_id)
        tokens = arguments.token_ids(token_ids)
        if request.chain is None:
            raise ConfigError("request_id", repr(request.request_id), "must be admitted with admit, not admit_hashed")
        chain, hashes = request.chain.extended(tokens)
        return id_array(self._blocks.extend(request, len(tokens), chain, hashes))

    def extend_hashed(self, request_id: RequestId, digests: Digests, num_tokens: int) -> npt.NDArray[np.int32]:
        """Add tokens at the end of a request that was admitted with `admit_hashed`."""
        request = self._request(request_id)
        hashes = arguments.digests(digests)
        count = arguments.integer("num_tokens", num_tokens, 0, arguments.MAX_COUNT)
        if request.chain is not None:
            raise ConfigError("request_id", repr(request.request_id), "must be admitted with admit_hashed, not admit")
        full_blocks = (request.num_tokens + count) // self._block_size
        arguments.digest_count(hashes, full_blocks - len(request.hashes))
        return id_array(self._blocks.extend(request, count, None, hashes))

    def commit(self, request_id: RequestId, num_tokens: int) -> None:
        """Say that the KV of the request's first tokens is written."""
        request = self._request(request_id)
        self._blocks.commit(request, arguments.integer("num_tokens", num_tokens, 0, request.num_tokens))

    def is_ready(self, request_id: RequestId) -> bool:
        """Whether all loads of the request have finished."""
        return self._request(request_id).ready

    def valid_tokens(self, request_id: RequestId) -> int:
        """How many leading tokens have valid KV now."""
        return self._request(request_id).valid_tokens

    def block_ids(self, request_id: RequestId) -> npt.NDArray[np.int32]:
        """All Gpu block ids of a live request, in order: shape (blocks,), int32."""
        return id_array(self._request(request_id).block_ids)

    def release(self, request_id: RequestId) -> None:
        """End a finished request."""
        self._end(request_id, "num_released")

    def abort(self, request_id: RequestId) -> None:
        """End a request that will not finish."""
        self._end(request_id, "num_aborted")

    def preempt(self, request_id: RequestId) -> None:
        """End a request that will be admitted again later."""
        self._end(request_id, "num_preempted")

    def _end(self, request_id: RequestId, counter: str) -> None:
        self._blocks.end(self._request(request_id))
        self._blocks.journal.count(counter)

    def _request(self, request_id: RequestId) -> Request:
        key = arguments.request_id(request_id)
        if key not in self._blocks.requests:
            raise UnknownRequestError(key)
        return self._blocks.requests[key]

    def step(self) -> Plan:
        """Plan the copies that are due now: all loads, then stores within the budget."""
        step = self._blocks.step()
        return Plan(
            loads=pair_array(step.load_pairs),
            stores=pair_array(step.store_pairs),
            load_ticket=step.load_ticket,
            store_ticket=step.store_ticket,
            not_stored=step.not_stored,
        )

    def get_and_reset_swaps(self) -> Swaps:
        """As `step`, in the form `(blocks to swap out, blocks to swap in)`."""
        step = self._blocks.step()
        return Swaps(
            swap_out=step.store_pairs,
            swap_in=step.load_pairs,
            store_ticket=step.store_ticket,
            load_ticket=step.load_ticket,
        )

    def complete(self, ticket: int, rank: int = 0, failed: Sequence[int] | Buffer = ()) -> bool:
        """Acknowledge the copies of a ticket; True if this was the last rank."""
        number = arguments.index("ticket", ticket)
        waiting = self._blocks.tickets.get(number)
        if waiting is None:
            finished = 1 <= number <= self._blocks.last_ticket
            self._refuse_stale(number, "is already finished" if finished else "was never issued")
        rank = arguments.integer("rank", rank, 0, self._ranks - 1)
        if rank not in waiting.waiting_ranks:
            self._refuse_stale(number, f"rank {rank} has acknowledged it before")
        return self._blocks.acknowledge(number, rank, arguments.failed_pairs(failed, waiting.num_pairs))

    def _refuse_stale(self, ticket: int, reason: str) -> NoReturn:
        self._blocks.journal.count("num_stale_completions")
        raise StaleTicketError(ticket, reason)

    def open_tickets(self) -> list[int]:
        """Tickets that wait for an acknowledgement, oldest first."""
        return list(self._blocks.tickets)

    def lookup(
        self,
        token_ids: TokenIds,
        salt: Identity | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> tuple[int, int]:
        """How many blocks `admit` would find now, in the Gpu tier and after those in the Cpu tier."""
        tokens = arguments.token_ids(token_ids)
        _, hashes = self._chain(tokens, salt, adapter, media)
        return self._blocks.find(self._blocks.usable(hashes, len(tokens)))

    def lookup_hashed(self, digests: Digests) -> tuple[int, int]:
        """As `lookup`, over all the given hashes."""
        return self._blocks.find(arguments.digests(digests))

    def block_hashes(
        self,
        token_ids: TokenIds,
        salt: Identity | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
    ) -> bytes:
        """The hashes of the full blocks of these tokens, 32 bytes each."""
        _, hashes = self._chain(arguments.token_ids(token_ids), salt, adapter, media)
        return b"".join(hashes)

    def _chain(
        self, tokens: list[int], salt: Identity | None, adapter: Adapter | None, media: Sequence[MediaItem]
    ) -> tuple[hashing.TokenChain, list[bytes]]:
        root = hashing.request_root(self._root, arguments.salt(salt), arguments.adapter(adapter))
        items = hashing.sorted_media(arguments.media(media, len(tokens)))
        chain = hashing.TokenChain(self._block_size, root, items, algorithm=self._hash, root=self._root)
        return chain.extended(tokens)

    def reset(self) -> bool:
        """Forget every cached block of both tiers; False while a request is live or a ticket is open."""
        return self._blocks.clear()

    def stats(self) -> dict[str, int]:
        """Counters since construction and gauges of now, by name."""
        return self._blocks.statistics()

    def events(self) -> list[Event]:
        """What became a hit and what ceased to be one since the last call, in order."""
        return self._blocks.journal.drain()

    def audit(self) -> None:
        """Prove the table's invariants; raises `InvariantError` if one does not hold."""
        audit(self._blocks)
