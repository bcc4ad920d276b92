"""Block hashes computed straight from the text of docs/design.md, with nothing of the package's code."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any, NamedTuple


class Identity(NamedTuple):
    """What, besides its tokens, makes a request's blocks its own."""

    salt: Any = None
    adapter: Any = None
    media: tuple[tuple[Any, int], ...] = ()


PLAIN = Identity()


def tagged(tag: str, value: Any) -> bytes:
    if isinstance(value, int):
        return tag.encode() + b"i" + struct.pack("<Q", 16) + (value % 2**128).to_bytes(16, "little")
    data = value.encode("utf-8") if isinstance(value, str) else value
    return tag.encode() + b"b" + struct.pack("<Q", len(data)) + data


def block_hashes(tokens: list[int], identity: Identity, block_size: int, root: bytes = b"") -> list[bytes]:
    parent = sha256(b"kvtier-root-v1" + struct.pack("<I", block_size) + tagged("r", root)).digest()
    if identity.salt is not None or identity.adapter is not None:
        message = parent
        if identity.salt is not None:
            message += tagged("s", identity.salt)
        if isinstance(identity.adapter, tuple):
            message += tagged("t", len(identity.adapter))
            message += b"".join(tagged("a", part) for part in identity.adapter)
        elif identity.adapter is not None:
            message += tagged("a", identity.adapter)
        parent = sha256(message).digest()
    hashes = []
    for first in range(0, len(tokens) // block_size * block_size, block_size):
        message = parent + struct.pack(f"<{block_size}I", *tokens[first : first + block_size])
        in_block = [(offset - first, value) for value, offset in identity.media if 0 <= offset - first < block_size]
        for offset, value in sorted(in_block, key=lambda item: item[0]):
            message += struct.pack("<I", offset) + tagged("m", value)
        parent = sha256(message).digest()
        hashes.append(parent)
    return hashes


def fingerprints(tokens: list[int], identity: Identity, block_size: int) -> list[tuple[Any, ...]]:
    """What each full block holds: everything that its keys and values depend on."""
    prints = []
    for end in range(block_size, len(tokens) + 1, block_size):
        media = tuple(sorted(((offset, plain(value)) for value, offset in identity.media if offset < end), key=repr))
        prints.append((plain(identity.salt), plain(identity.adapter), media, tuple(tokens[:end])))
    return prints


def plain(value: Any) -> Any:
    """Text and its UTF-8 bytes mean the same."""
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    return value.encode("utf-8") if isinstance(value, str) else value
