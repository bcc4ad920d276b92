"""What the table remembers about requests, loads, stores and tickets."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.reference.hashing import Chain


@dataclass(eq=False)
class Request:
    """A live request, or one that has gone and is still named by a load ticket."""

    request_id: str | int
    num_tokens: int
    chain: Chain
    hashes: list[bytes]
    """Of its full blocks."""
    block_ids: list[int]
    gpu_hits: int
    cpu_hits: int
    valid_tokens: int = 0
    """Leading tokens with valid KV: hits that came through, then committed tokens."""
    ready: bool = True
    """Whether its loads have finished."""
    remembered_commit: int = 0
    """The most tokens committed while loads ran."""
    live: bool = True


@dataclass(frozen=True, eq=False)
class Load:
    """One copy from the Cpu to the Gpu tier; it holds its source."""

    request: Request
    position: int
    """Block position in the request."""
    block_hash: bytes
    source: int
    destination: int


@dataclass(frozen=True, eq=False)
class Store:
    """One copy from the Gpu to the Cpu tier; it holds its source."""

    block_hash: bytes
    source: int
    destination: int


@dataclass(eq=False)
class Ticket:
    """Copies that run, either loads or stores, until every rank has acknowledged them."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    waiting_ranks: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    """Indices of pairs that failed on some rank."""

    @property
    def num_pairs(self) -> int:
        """Copies under the ticket."""
        return len(self.loads) + len(self.stores)


@dataclass(frozen=True, eq=False)
class Step:
    """The copies that one step planned, and why others have to wait."""

    loads: list[Load]
    load_ticket: int | None
    stores: list[Store]
    store_ticket: int | None
    not_stored: dict[str, int]

    @property
    def load_pairs(self) -> list[tuple[int, int]]:
        """(Cpu block id, Gpu block id) of each load."""
        return [(load.source, load.destination) for load in self.loads]

    @property
    def store_pairs(self) -> list[tuple[int, int]]:
        """(Gpu block id, Cpu block id) of each store."""
        return [(store.source, store.destination) for store in self.stores]
