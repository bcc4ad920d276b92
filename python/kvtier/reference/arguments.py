"""Checks of what callers pass in: each refusal names the argument, the value and the limit."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

from kvtier.errors import ConfigError
from kvtier.reference.hashing import Adapter, Identity, MediaItem

MAX_TOKEN_ID = 2**32 - 1
MAX_COUNT = 2**63 - 1
MAX_ITEMS = 2**26
"""Longest sequence or buffer that one call takes."""
SIGNED, UNSIGNED = "bhilqn", "BHILQN"
DIGEST_BYTES = 32


def integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer in low .. high.

    Raises:
        ConfigError: It is outside.
        TypeError: It is no integer.
    """
    number = index(name, value)
    if not low <= number <= high:
        raise ConfigError(name, number, f"must be {low} .. {high}")
    return number


def index(name: str, value: Any) -> int:
    """An integer of any size, or an object that stands for one.

    Raises:
        TypeError: It is no integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be int, not {type(value).__name__}")
    return operator.index(value)


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of the known names.

    Raises:
        ConfigError: It is another one.
        TypeError: It is no str.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be str, not {type(value).__name__}")
    if value not in known:
        raise ConfigError(name, repr(value), f"must be one of {', '.join(map(repr, known))}")
    return value


def request_id(value: Any) -> str | int:
    """A request id: a str that is valid Unicode, or an integer of 64 bits.

    Raises:
        ConfigError: It is outside.
        TypeError: It is neither.
    """
    if isinstance(value, str):
        return _unicode("request_id", value)
    return integer("request_id", value, -(2**63), 2**63 - 1)


def _unicode(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(name, repr(value), "must be valid Unicode, without lone surrogates") from None
    return value


def _buffer(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


def _length(name: str, num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise ConfigError(name, f"{num_items} items", f"must be at most {MAX_ITEMS}")


def _integers(name: str, value: Any, low: int, high: int) -> list[int]:
    """A sequence of integers, or a one-dimensional contiguous buffer of them."""
    view = _buffer(value)
    if view is not None:
        kind = view.format.lstrip("@=<")
        if view.ndim != 1 or not view.c_contiguous or len(kind) != 1 or kind not in SIGNED + UNSIGNED:
            shape = f"a buffer of format {view.format!r}, {view.ndim} dimensions, strides {view.strides}"
            raise ConfigError(name, shape, "must be one-dimensional, contiguous, of native integers")
        _length(name, len(view))
        # By item size, since the letters mean different sizes with and without a byte order in front.
        native = {1: "b", 2: "h", 4: "i", 8: "q"}[view.itemsize]
        items = array(native if kind in SIGNED else native.upper(), view.tobytes()).tolist()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        _length(name, len(value))
        items = [index(f"{name}[{position}]", item) for position, item in enumerate(value)]
    else:
        raise TypeError(f"{name} must be a sequence of int or a buffer, not {type(value).__name__}")
    for position, item in enumerate(items):
        if not low <= item <= high:
            raise ConfigError(f"{name}[{position}]", item, f"must be {low} .. {high}")
    return items


def token_ids(value: Any) -> list[int]:
    """Token ids as a list, each in 0 .. 2**32 - 1.

    Raises:
        ConfigError: One is outside, or the buffer has the wrong form.
        TypeError: It is neither a sequence of int nor a buffer.
    """
    return _integers("token_ids", value, 0, MAX_TOKEN_ID)


def failed_pairs(value: Any, num_pairs: int) -> set[int]:
    """Indices of pairs, each in 0 .. num_pairs - 1.

    Raises:
        ConfigError: One is outside, or the buffer has the wrong form.
        TypeError: It is neither a sequence of int nor a buffer.
    """
    return set(_integers("failed", value, 0, num_pairs - 1))


def digests(value: Any) -> list[bytes]:
    """Block hashes as a list of 32 bytes each.

    Raises:
        ConfigError: One has another length.
        TypeError: It is neither a sequence of bytes nor a buffer.
    """
    view = _buffer(value)
    if view is not None:
        if not view.c_contiguous or view.itemsize != 1 or view.nbytes % DIGEST_BYTES:
            shape = f"a buffer of {view.nbytes} bytes in items of {view.itemsize}"
            raise ConfigError("digests", shape, f"must be contiguous bytes, {DIGEST_BYTES} for each block")
        packed = view.tobytes()
        return [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"digests must be a sequence of bytes or a buffer, not {type(value).__name__}")
    _length("digests", len(value))
    for position, item in enumerate(value):
        if not isinstance(item, bytes):
            raise TypeError(f"digests must contain bytes, not {type(item).__name__}")
        if len(item) != DIGEST_BYTES:
            raise ConfigError(f"digests[{position}]", f"{len(item)} bytes", f"must be {DIGEST_BYTES} bytes")
    return list(value)


def digest_count(hashes: Sequence[bytes], expected: int) -> None:
    """Exactly as many hashes as blocks become full.

    Raises:
        ConfigError: More or fewer.
    """
    if len(hashes) != expected:
        raise ConfigError("digests", f"{len(hashes)} hashes", f"must be {expected}, one for each full block")


def identity(name: str, value: Any) -> Identity:
    """A str, bytes or an integer of 128 bits.

    Raises:
        ConfigError: It is outside.
        TypeError: It is none of them.
    """
    if isinstance(value, str):
        return _unicode(name, value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return integer(name, value, -(2**127), 2**127 - 1)
    raise TypeError(f"{name} must be str, bytes or int, not {type(value).__name__}")


def salt(value: Any) -> Identity | None:
    """The salt of a request, or None; raises as `identity`."""
    return None if value is None else identity("salt", value)


def adapter(value: Any) -> Adapter | None:
    """The adapter of a request, or None; raises as `identity`."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(identity("adapter", element) for element in value)
    return identity("adapter", value)


def media(value: Any, num_tokens: int) -> list[MediaItem]:
    """Media items, each at the position of a token.

    Raises:
        ConfigError: An offset is outside the tokens, or a hash is outside its limits.
        TypeError: It is no sequence of pairs.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"media must be a sequence of (hash, offset), not {type(value).__name__}")
    _length("media", len(value))
    items: list[MediaItem] = []
    for item in value:
        if not isinstance(item, tuple) or len(item) != 2:
            raise TypeError("media must contain tuples (hash, offset)")
        items.append((identity("media hash", item[0]), integer("media offset", item[1], 0, num_tokens - 1)))
    return items
