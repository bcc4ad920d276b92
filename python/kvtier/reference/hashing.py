"""Block hashes: what makes two blocks the same block (docs/design.md, section Hashes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

Identity = str | bytes | int
Adapter = Identity | tuple[Identity, ...]
MediaItem = tuple[Identity, int]


def u32(value: int) -> bytes:
    """Four bytes, little-endian."""
    return value.to_bytes(4, "little")


def field(tag: bytes, value: Identity) -> bytes:
    """A value with its tag, type and length in front, so that no two lists of values look alike."""
    if isinstance(value, int):
        kind, payload = b"i", value.to_bytes(16, "little", signed=True)
    else:
        kind, payload = b"b", value.encode() if isinstance(value, str) else value
    return tag + kind + len(payload).to_bytes(8, "little") + payload


def root_hash(block_size: int, root: bytes, algorithm: str = "sha256") -> bytes:
    """The parent of the first block of a request without salt and adapter."""
    text = b"kvtier-root-v1" + u32(block_size) + field(b"r", root)
    if algorithm != "sha256":
        text += field(b"h", algorithm)
    return sha256(text).digest()


def block_hash(algorithm: str, root: bytes, text: bytes) -> bytes:
    """The hash of a block: `sha256`, or `xxh3` with the first bytes of the table's root as its seed.

    Raises:
        ModuleNotFoundError: `xxh3` is wanted, and the package xxhash is not installed.
    """
    if algorithm == "sha256":
        return sha256(text).digest()
    from xxhash import xxh3_128_intdigest

    seed = int.from_bytes(root[:8], "little")
    return int(xxh3_128_intdigest(text, seed)).to_bytes(32, "little")


def request_root(root: bytes, salt: Identity | None, adapter: Adapter | None) -> bytes:
    """The parent of a request's first block."""
    if salt is None and adapter is None:
        return root
    text = root
    if salt is not None:
        text += field(b"s", salt)
    if isinstance(adapter, tuple):
        text += field(b"t", len(adapter)) + b"".join(field(b"a", element) for element in adapter)
    elif adapter is not None:
        text += field(b"a", adapter)
    return sha256(text).digest()


@dataclass(frozen=True)
class TokenChain:
    """A chain of hashes up to the last full block, with what the next hash will need."""

    block_size: int
    parent: bytes
    media: tuple[MediaItem, ...]
    """Sorted by offset; items at one offset in the order given."""
    start: int = 0
    """Position of the first token that is not in a full block yet."""
    tail: tuple[int, ...] = ()
    """The tokens from `start` on: fewer than `block_size`."""
    algorithm: str = "sha256"
    root: bytes = b""
    """That of the table, from which `xxh3` has its seed."""

    def extended(self, tokens: Sequence[int]) -> tuple[TokenChain, list[bytes]]:
        """The chain after more tokens, and the hashes of the blocks that they filled."""
        waiting = [*self.tail, *tokens]
        parent, start = self.parent, self.start
        hashes: list[bytes] = []
        for at in range(0, len(waiting) - self.block_size + 1, self.block_size):
            text = parent + b"".join(u32(token) for token in waiting[at : at + self.block_size])
            for value, offset in self.media:
                if start <= offset < start + self.block_size:
                    text += u32(offset - start) + field(b"m", value)
            parent = block_hash(self.algorithm, self.root, text)
            hashes.append(parent)
            start += self.block_size
        tail = tuple(waiting[len(hashes) * self.block_size :])
        return replace(self, parent=parent, start=start, tail=tail), hashes


Chain = TokenChain | None
"""None for a request whose block hashes the caller gives."""


def sorted_media(media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Media items in the order in which they enter the hash."""
    return tuple(sorted(media, key=lambda item: item[1]))
