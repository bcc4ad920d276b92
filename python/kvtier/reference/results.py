"""What the calls of the twin return: the same attributes as the classes of the compiled core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pairs = list[tuple[int, int]]


def id_array(block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Block ids as an array: shape (blocks,), int32."""
    import numpy as np

    return np.array(block_ids, dtype=np.int32)


def pair_array(pairs: Pairs) -> npt.NDArray[np.int32]:
    """Pairs of (source, destination) as an array: shape (pairs, 2), int32."""
    import numpy as np

    return np.array(pairs, dtype=np.int32).reshape(len(pairs), 2)


@dataclass(frozen=True, eq=False)
class Admission:
    """What `admit` found and reserved."""

    block_ids: npt.NDArray[np.int32]
    """Gpu block ids for all tokens, in order: shape (blocks,), int32."""
    gpu_hit_blocks: int
    cpu_hit_blocks: int
    fresh_blocks: int
    cached_tokens: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The copies of one step."""

    loads: npt.NDArray[np.int32]
    """Rows (Cpu block id, Gpu block id): shape (n, 2), int32."""
    stores: npt.NDArray[np.int32]
    """Rows (Gpu block id, Cpu block id): shape (n, 2), int32."""
    load_ticket: int | None
    store_ticket: int | None
    not_stored: dict[str, int]


@dataclass(frozen=True)
class Swaps(Sequence[Pairs]):
    """The copies of one step as two lists: blocks to swap out, blocks to swap in."""

    swap_out: Pairs
    """Stores: (Gpu block id, Cpu block id)."""
    swap_in: Pairs
    """Loads: (Cpu block id, Gpu block id)."""
    store_ticket: int | None
    load_ticket: int | None

    def __len__(self) -> Literal[2]:
        return 2

    def __getitem__(self, index: int) -> Pairs:  # type: ignore[override]
        return (self.swap_out, self.swap_in)[index]

    def __iter__(self) -> Iterator[Pairs]:
        return iter((self.swap_out, self.swap_in))


@dataclass(frozen=True)
class Event:
    """One change of what a tier holds."""

    kind: Literal["stored", "removed"]
    tier: Literal["gpu", "cpu"]
    block_hash: bytes
    block_id: int
