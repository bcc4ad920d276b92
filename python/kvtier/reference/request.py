"""What the table remembers about requests, loads and tickets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvtier.reference.hashing import HashedChain, TokenChain


@dataclass(eq=False)
class Request:
    """A live request, or one that has gone and is still named by a load ticket."""

    request_id: str | int
    num_tokens: int
    chain: TokenChain | HashedChain
    hashes: list[bytes]
    """Of its full blocks."""
    block_ids: list[int]
    gpu_hits: int
    cpu_hits: int
    valid_tokens: int
    """Leading tokens with valid KV; commits move it up. Commit has handled `valid_tokens // block_size` blocks."""
    ready: bool
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
    """Copies that run, until every rank has acknowledged them."""

    kind: Literal["load", "store"]
    loads: list[Load]
    stores: list[Store]
    waiting_ranks: set[int]
    failed: set[int] = field(default_factory=set)
    """Indices of pairs that failed on some rank."""

    @property
    def num_pairs(self) -> int:
        """Copies under the ticket."""
        return len(self.loads) + len(self.stores)
