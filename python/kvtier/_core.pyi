"""Types of the compiled core. Shapes, dtypes and units are part of each docstring."""

from collections.abc import Iterator, Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__all__ = [
    "Admission",
    "BlockTable",
    "CopyWorkers",
    "DescribedMemory",
    "Event",
    "HostArena",
    "HostTable",
    "OutlinedTickets",
    "Plan",
    "Swaps",
    "__build__",
    "__version__",
]

__version__: str

__build__: Literal["release", "debug"]
"""Whether the core was compiled with optimisation."""

_Identity = str | bytes | int
"""A value that becomes part of a block hash: text (UTF-8), bytes, or a signed integer below 2**127."""

_TokenIds = Sequence[int] | Buffer
"""Token ids, each in 0 .. 2**32 - 1: a sequence of int, or a one-dimensional contiguous buffer of any integer dtype; at
most 2**26 in one call."""

_Digests = Sequence[bytes] | Buffer
"""Block hashes: a sequence of 32-byte `bytes`, or one contiguous byte buffer of 32 bytes per block."""

_RequestId = str | int
"""The caller's name of a request; `1` and `"1"` are different requests. Integers must fit 64 bits, signed."""

@final
class Admission:
    """What `BlockTable.admit` found and reserved. Immutable."""

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Device-local Gpu block ids for all tokens, in order: shape (blocks,), int32. Hits first, then fresh."""
    @property
    def gpu_hit_blocks(self) -> int:
        """Leading blocks that are in the Gpu tier."""
    @property
    def cpu_hit_blocks(self) -> int:
        """Blocks after those that the next `step` loads from the Cpu tier."""
    @property
    def fresh_blocks(self) -> int:
        """Blocks after those, with nothing in them yet."""
    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be computed once the request is ready: hit blocks times `block_size`."""

@final
class Plan:
    """The copies of one step. Immutable."""

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Copies Cpu to Gpu: shape (n, 2), int32, rows (Cpu block id, Gpu block id)."""
    @property
    def stores(self) -> npt.NDArray[np.int32]:
        """Copies Gpu to Cpu: shape (n, 2), int32, rows (Gpu block id, Cpu block id)."""
    @property
    def load_ticket(self) -> int | None:
        """Ticket of `loads`; None if there are none."""
    @property
    def store_ticket(self) -> int | None:
        """Ticket of `stores`; None if there are none."""
    @property
    def not_stored(self) -> dict[str, int]:
        """Blocks that wait for a later step, by reason (`"budget"`, `"no_cpu_slot"`); reasons of zero are left out."""

@final
class Swaps(Sequence[list[tuple[int, int]]]):
    """The copies of one step as `(blocks to swap out, blocks to swap in)`; unpacks into the two lists. Immutable."""

    @property
    def swap_out(self) -> list[tuple[int, int]]:
        """Stores: (Gpu block id, Cpu block id)."""
    @property
    def swap_in(self) -> list[tuple[int, int]]:
        """Loads: (Cpu block id, Gpu block id)."""
    @property
    def store_ticket(self) -> int | None:
        """Ticket of `swap_out`; None if it is empty."""
    @property
    def load_ticket(self) -> int | None:
        """Ticket of `swap_in`; None if it is empty."""
    def __len__(self) -> Literal[2]: ...
    def __getitem__(self, index: int, /) -> list[tuple[int, int]]: ...  # type: ignore[override]
    def __iter__(self) -> Iterator[list[tuple[int, int]]]: ...

@final
class Event:
    """One change of what a tier holds. Immutable."""

    @property
    def kind(self) -> Literal["stored", "removed"]:
        """`"stored"` when the block became a hit, `"removed"` when it ceased to be one."""
    @property
    def tier(self) -> Literal["gpu", "cpu"]:
        """The tier."""
    @property
    def block_hash(self) -> bytes:
        """The block hash, 32 bytes."""
    @property
    def block_id(self) -> int:
        """The block id inside that tier."""

@final
class BlockTable:
    """The block allocator of an engine, with a Gpu tier and a Cpu tier.

    It hands out block ids and plans copies; it never touches the blocks' memory. `lookup`, `lookup_hashed`,
    `block_hashes`, `stats`, `events` and `complete` may be called from any thread at any time; every other method
    by one scheduler thread at a time, or it raises `SessionInUseError`. An argument of the wrong type is a `TypeError`.
    See docs/design.md for every decision it takes.
    """

    def __new__(
        cls,
        gpu_blocks: int,
        cpu_blocks: int,
        block_size: int,
        policy: str = "lru",
        store: str = "eager",
        max_store_blocks_per_step: int | None = None,
        ranks: int = 1,
        hash: str = "sha256",
        root: bytes = b"",
    ) -> BlockTable:
        """Make an empty table.

        Args:
            gpu_blocks: Blocks of the Gpu tier, 1 .. 2**24.
            cpu_blocks: Blocks of the Cpu tier, 0 .. 2**24; 0 makes a plain prefix cache.
            block_size: Tokens per block, 1 .. 65536.
            policy: Which block to evict: `"lru"`, the least recently released.
            store: Which blocks to store: `"eager"`, every published block that the Cpu tier lacks.
            max_store_blocks_per_step: Most stores that one `step` plans, 0 or more; None: no limit.
            ranks: Workers that must acknowledge each ticket, 1 .. 32.
            hash: How token ids become block hashes: `"sha256"`, or `"xxh3"` (128 bits), several times as fast, for a
                single trusted tenant: who knows `root` can make two prompts that share a block's hash.
            root: Mixed into every block hash. Put in it whatever makes blocks of two engines incompatible: model,
                dtype, layout.

        Raises:
            ConfigError: An argument is outside its limits.
        """

    @property
    def gpu_blocks(self) -> int: ...
    @property
    def cpu_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def admit(
        self,
        request_id: _RequestId,
        token_ids: _TokenIds,
        salt: _Identity | None = None,
        adapter: _Identity | tuple[_Identity, ...] | None = None,
        media: Sequence[tuple[_Identity, int]] = (),
    ) -> Admission:
        """Find the longest usable prefix, hold it, and reserve Gpu blocks for all tokens; or change nothing.

        Args:
            request_id: A name for the request, not in use by a live one.
            token_ids: The tokens, at least one.
            salt: Separates tenants: requests with different salts share no block.
            adapter: Separates adapters (LoRA): name, number, or a tuple of them.
            media: Items that stand behind placeholder tokens: (content hash, position of the item's first token).

        Raises:
            ConfigError: An argument is outside its limits, or the id is in use.
            OutOfBlocksError: The Gpu tier cannot hold the request now; nothing was changed.
        """
    def admit_hashed(self, request_id: _RequestId, digests: _Digests, num_tokens: int) -> Admission:
        """As `admit`, with the block hashes given: exactly `num_tokens // block_size` of them.

        Raises:
            ConfigError: An argument is outside its limits, or the id is in use.
            OutOfBlocksError: The Gpu tier cannot hold the request now; nothing was changed.
        """
    def extend(self, request_id: _RequestId, token_ids: _TokenIds) -> npt.NDArray[np.int32]:
        """Add tokens at the end of a request that was admitted with `admit`.

        Returns:
            The ids of the Gpu blocks added, in order: shape (blocks,), int32; often empty.

        Raises:
            ConfigError: A token id is out of range, or the request was admitted with `admit_hashed`.
            OutOfBlocksError: The Gpu tier has no block for it now; nothing was changed.
            UnknownRequestError: No live request has this id.
        """
    def extend_hashed(self, request_id: _RequestId, digests: _Digests, num_tokens: int) -> npt.NDArray[np.int32]:
        """Add `num_tokens` tokens at the end of a request that was admitted with `admit_hashed`.

        Args:
            request_id: The request.
            digests: Hashes of the blocks that became full by this call, exactly as many.
            num_tokens: Tokens added (not the new total).

        Returns:
            The ids of the Gpu blocks added, in order: shape (blocks,), int32.

        Raises:
            ConfigError: An argument is outside its limits, or the request was admitted with `admit`.
            OutOfBlocksError: The Gpu tier has no block for it now; nothing was changed.
            UnknownRequestError: No live request has this id.
        """
    def commit(self, request_id: _RequestId, num_tokens: int) -> None:
        """Say that the KV of the request's first `num_tokens` tokens is written (accepted tokens only).

        Full blocks among them become hits for others and may be stored. Calling again with no more tokens does
        nothing. While loads of the request run, the call is remembered and takes effect when they have finished.

        Raises:
            ConfigError: More tokens than the request has.
            UnknownRequestError: No live request has this id.
        """
    def is_ready(self, request_id: _RequestId) -> bool:
        """Whether all loads of the request have finished, well or badly (see `valid_tokens`).

        Raises:
            UnknownRequestError: No live request has this id.
        """
    def valid_tokens(self, request_id: _RequestId) -> int:
        """How many leading tokens have valid KV now: hits whose loads came through, then committed tokens.

        Less than `cached_tokens` on a ready request means that a load failed: compute from there on.

        Raises:
            UnknownRequestError: No live request has this id.
        """
    def block_ids(self, request_id: _RequestId) -> npt.NDArray[np.int32]:
        """All Gpu block ids of a live request, in order: shape (blocks,), int32.

        Raises:
            UnknownRequestError: No live request has this id.
        """
    def release(self, request_id: _RequestId) -> None:
        """End a finished request. Its committed full blocks stay cached.

        Raises:
            UnknownRequestError: No live request has this id.
        """
    def abort(self, request_id: _RequestId) -> None:
        """End a request that will not finish. Its committed full blocks stay cached, all else is dropped.

        Raises:
            UnknownRequestError: No live request has this id.
        """
    def preempt(self, request_id: _RequestId) -> None:
        """End a request that will be admitted again later: its committed full blocks stay cached and come back as hits.

        Raises:
            UnknownRequestError: No live request has this id.
        """
    def step(self) -> Plan:
        """Plan the copies that are due now: all loads, then stores within the budget."""
    def get_and_reset_swaps(self) -> Swaps:
        """As `step`, in the form `(blocks to swap out, blocks to swap in)`; the tickets are attributes of it."""
    def complete(self, ticket: int, rank: int = 0, failed: Sequence[int] | Buffer = ()) -> bool:
        """Acknowledge the copies of a ticket.

        Args:
            ticket: `Plan.load_ticket` or `Plan.store_ticket`.
            rank: The worker that acknowledges, 0 .. ranks - 1.
            failed: Indices of the pairs that did not copy on this rank, in any order.

        Returns:
            True if this was the last rank and the ticket is finished.

        Raises:
            ConfigError: rank or an index is out of range; nothing was changed.
            StaleTicketError: The ticket is unknown, finished, or acknowledged by this rank before; nothing was changed.
        """
    def open_tickets(self) -> list[int]:
        """Tickets that wait for an acknowledgement, oldest first."""
    def lookup(
        self,
        token_ids: _TokenIds,
        salt: _Identity | None = None,
        adapter: _Identity | tuple[_Identity, ...] | None = None,
        media: Sequence[tuple[_Identity, int]] = (),
    ) -> tuple[int, int]:
        """How many blocks `admit` of the same arguments would find now: (in the Gpu tier, then in the Cpu tier).

        Changes nothing. No tokens: (0, 0).

        Raises:
            ConfigError: An argument is outside its limits.
        """
    def lookup_hashed(self, digests: _Digests) -> tuple[int, int]:
        """As `lookup`, over all the given block hashes: none is left out for a token to compute.

        Raises:
            ConfigError: A digest is not 32 bytes long.
        """
    def block_hashes(
        self,
        token_ids: _TokenIds,
        salt: _Identity | None = None,
        adapter: _Identity | tuple[_Identity, ...] | None = None,
        media: Sequence[tuple[_Identity, int]] = (),
    ) -> bytes:
        """The hashes of the full blocks of these tokens, 32 bytes each, as `admit` would compute them.

        Raises:
            ConfigError: An argument is outside its limits.
        """
    def reset(self) -> bool:
        """Forget every cached block of both tiers.

        Returns:
            False, and nothing changed, while a request is live or a ticket is open.
        """
    def share(self, gpu_blocks: int) -> BlockTable:
        """Make a table with a Gpu tier of its own that shares this table's Cpu tier.

        Each sees the blocks that the other has stored, once they are acknowledged. Every setting but the size of the
        Gpu tier is this table's. Events come out of one log, whichever table is asked.

        Args:
            gpu_blocks: Blocks of the new Gpu tier, 1 .. 2**24.

        Raises:
            ConfigError: `gpu_blocks` is outside its limits.
        """
    def stats(self) -> dict[str, int]:
        """Counters since construction and gauges of now, by name; see docs/design.md, section Statistics."""
    def events(self) -> list[Event]:
        """What became a hit and what ceased to be one since the last call, in order.

        At most 65,536 wait; what follows is dropped, and counted in `stats()["events_dropped"]`.
        """
    def audit(self) -> None:
        """Prove the table's invariants, in time proportional to its size.

        Raises:
            InvariantError: One does not hold; the text names it and the slot.
        """

@final
class HostTable:
    """The Cpu tier beside an engine that owns its Gpu blocks itself; see docs/vllm.md. For one thread at a time.

    Blocks are keyed by the engine's own 32-byte hashes, as they are. Gpu block ids pass through unchanged.
    """

    def __new__(cls, cpu_blocks: int, ranks: int = 1, history_blocks: int = 0) -> HostTable:
        """Make an empty table.

        Args:
            cpu_blocks: Slots, 1 .. 2**24.
            ranks: Workers that acknowledge each ticket, 1 .. 32.
            history_blocks: Blocks whose uses are remembered, for `offer(only_repeated=True)`, 0 .. 2**26.

        Raises:
            ConfigError: An argument is outside its limits.
        """

    @property
    def cpu_blocks(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def lookup(self, digests: _Digests) -> tuple[int, bool]:
        """Find leading blocks that could be loaded now; hold nothing.

        Returns:
            Number of leading hits that no open ticket is loading, and whether the block after them is being loaded:
            then it is better waited for than loaded twice.

        Raises:
            ConfigError: A digest is not 32 bytes long.
        """
    def load(self, digests: _Digests, gpu_ids: Sequence[int] | Buffer) -> tuple[int, npt.NDArray[np.int32]] | None:
        """Plan loads of hits, which are held until every rank has acknowledged.

        Args:
            digests: Block hashes.
            gpu_ids: Destination of each, 0 .. 2**24 - 1.

        Returns:
            The ticket and rows (Cpu block id, Gpu block id), shape (n, 2), int32, in the order given. None, and nothing
            held, if there are no digests or one of them is not a hit.

        Raises:
            ConfigError: An argument is outside its limits.
        """
    def note_use(self, digests: _Digests) -> None:
        """Take note that a request uses blocks; to be called once per request and block.

        Raises:
            ConfigError: A digest is not 32 bytes long.
        """
    def offer(
        self,
        digests: _Digests,
        gpu_ids: Sequence[int] | Buffer,
        max_blocks: int | None = None,
        only_repeated: bool = False,
    ) -> tuple[int | None, npt.NDArray[np.int32]]:
        """Plan stores of those blocks that the tier lacks, evicting the least recently released for them.

        Args:
            digests: Block hashes.
            gpu_ids: Source of each, 0 .. 2**24 - 1.
            max_blocks: Most stores to plan; what is left out may be offered again. None: no limit.
            only_repeated: Leave out what was used only once, as `note_use` was told.

        Returns:
            The ticket, None if there is nothing to store, and rows (Gpu block id, Cpu block id): shape (n, 2), int32.

        Raises:
            ConfigError: An argument is outside its limits.
        """
    def complete(self, ticket: int, rank: int = 0, failed: Sequence[int] | Buffer = ()) -> bool:
        """Acknowledge the copies of a ticket; nothing becomes a hit before every rank has.

        A pair that failed on any rank is forgotten: the destination of a store is free again, the source of a load is
        withdrawn.

        Returns:
            True if this was the last rank and the ticket is finished.

        Raises:
            ConfigError: rank or an index is out of range; nothing was changed.
            StaleTicketError: The ticket is unknown, finished, or acknowledged by this rank before.
        """
    def open_tickets(self) -> list[int]:
        """Tickets that wait for an acknowledgement, oldest first."""
    def reset(self) -> bool:
        """Forget every block, and what open stores bring; False, and nothing changed, while a load is open."""
    def events(self) -> list[Event]:
        """What became a hit and what ceased to be one since the last call, in order; at most 65,536 are kept."""
    def stats(self) -> dict[str, int]:
        """Counters since construction and gauges of now, by name."""
    def audit(self) -> None:
        """Prove that every slot is in one state and every hold belongs to a ticket.

        Raises:
            InvariantError: One does not hold.
        """

@final
class DescribedMemory:
    """Where the bytes of each block are. `kvtier.MemoryLayout` wraps it and keeps the memory allocated."""

    def __new__(cls, fragments: list[tuple[int, int, int]], num_blocks: int) -> DescribedMemory:
        """Check a description.

        Args:
            fragments: Per fragment (address, block stride in bytes, bytes).
            num_blocks: Blocks, 1 .. 2**24.

        Raises:
            ConfigError: A value is outside its limits, or two fragments have a byte in common.
        """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block, without padding."""
    @property
    def fragments(self) -> list[tuple[int, int, int]]:
        """Per fragment (address, block stride in bytes, bytes); those without a gap between them are joined."""

@final
class HostArena(Buffer):
    """Anonymous memory for the slots of the Cpu tier: a writable buffer of all bytes. `kvtier.HostMemory` wraps it."""

    def __new__(cls, num_blocks: int, block_bytes: int) -> HostArena:
        """Map address space; no memory is behind it before `touch`.

        Args:
            num_blocks: Slots, 1 .. 2**24.
            block_bytes: Bytes of a block, 1 or more; its slot is rounded up to 4 KiB.

        Raises:
            ConfigError: A size is outside its limits, or the system refuses the mapping.
        """

    @staticmethod
    def sizes(num_blocks: int, block_bytes: int) -> tuple[int, int]:
        """Bytes of one slot and of all slots, without making an arena.

        Raises:
            ConfigError: A size is outside its limits.
        """
    def touch(self) -> None:
        """Put zeroed memory behind all bytes, with several threads; to be called once, before the first use."""
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def address(self) -> int:
        """Address of slot 0."""

@final
class CopyWorkers:
    """Queue and threads of a copy engine. `kvtier.CopyEngine` wraps it and documents the calls."""

    def __new__(
        cls, gpu: DescribedMemory, owner: object, cpu: HostArena, num_threads: int, max_queued: int
    ) -> CopyWorkers:
        """Start the threads.

        Args:
            gpu: The engine's memory.
            owner: Keeps that memory allocated; let go only when no thread can touch the memory any more.
            cpu: The host memory.
            num_threads: 1 .. 64.
            max_queued: 1 .. 2**20.

        Raises:
            ConfigError: An argument is outside its limits, or the two memories do not fit each other.
            TransferError: The system refused to start a thread.
        """

    def submit(self, ticket: int, direction_name: str, list: npt.NDArray[np.int32]) -> None: ...
    def submit_plan(
        self,
        load_ticket: int | None,
        loads: npt.NDArray[np.int32],
        store_ticket: int | None,
        stores: npt.NDArray[np.int32],
    ) -> None: ...
    def poll(self) -> list[tuple[int, list[int]]]: ...
    def wait(self, timeout_s: float) -> list[tuple[int, list[int]]]: ...
    def close(self, timeout_s: float) -> None: ...
    def request_stop(self) -> None:
        """Tell the threads to end, without waiting."""
    def stop(self, timeout_s: float) -> bool:
        """Tell the threads to end and wait for it, at most `timeout_s`; whether they have ended."""
    def inject_failures(self, direction_name: str, pairs: list[int] | None, num_tickets: int) -> None: ...
    def stats(self) -> dict[str, int | float]: ...

@final
class OutlinedTickets:
    """Tickets that the CUDA extension copies: validated, planned, apart from each other. `kvtier.cuda` wraps it."""

    def __new__(cls, gpu: DescribedMemory, cpu: HostArena, slots_per_chunk: int, max_queued: int) -> OutlinedTickets:
        """Check both sides against each other.

        Args:
            gpu: The engine's memory.
            cpu: The host memory.
            slots_per_chunk: Host slots in one chunk of registered memory; no piece crosses the border of two.
            max_queued: Most open tickets, 1 .. 2**20.

        Raises:
            ConfigError: An argument is outside its limits, or the two memories do not fit each other.
        """

    def open(
        self,
        load_ticket: int | None,
        loads: npt.NDArray[np.int32],
        store_ticket: int | None,
        stores: npt.NDArray[np.int32],
    ) -> Sequence[tuple[int, bool, npt.NDArray[np.uint64]]]:
        """Plan the lists of a plan that have a ticket, all or none.

        Returns:
            Per ticket (ticket, whether it loads, pieces). Pieces: shape (n, 6), uint64, rows (source address,
            destination address, source stride, destination stride, bytes of a row, rows); those of loads fragment by
            fragment, those of stores run by run.

        Raises:
            ConfigError: A block id is out of range, a destination occurs twice, or a ticket is missing or in use.
            TransferError: Too many tickets are open, or a block is part of an open one.
        """

    def open_pairs(
        self, ticket: int, direction_name: str, list: npt.NDArray[np.int32]
    ) -> Sequence[tuple[int, bool, npt.NDArray[np.uint64]]]:
        """As `open`, for one list under a ticket."""
    def end(self, ticket: int, succeeded: bool) -> list[int] | None:
        """Enter the end of a ticket: the indices of its failed pairs, all or none; None if it is not open."""
    @property
    def num_open(self) -> int:
        """Tickets that have not ended."""
