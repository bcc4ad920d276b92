"""Fake memory: one cell per block of each tier, which holds the name of the content that is in the block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import count
from typing import Literal

CopyMode = Literal["early", "late"]
Pair = tuple[int, int]


class FakeMemory:
    """Cells, and copies between them.

    Args:
        gpu_blocks: Cells of the Gpu tier.
        cpu_blocks: Cells of the Cpu tier.
        mode: Whether a copy takes effect when it is planned (`"early"`) or when it is acknowledged (`"late"`).
            Real copies take effect some time in between, so a table must be right in both.
    """

    def __init__(self, gpu_blocks: int, cpu_blocks: int, mode: CopyMode) -> None:
        self._junk = count()
        self.mode = mode
        self.cells = {"gpu": [self.junk() for _ in range(gpu_blocks)], "cpu": [self.junk() for _ in range(cpu_blocks)]}

    def junk(self) -> Hashable:
        """Content that equals nothing else."""
        return ("junk", next(self._junk))

    def spoil(self, tier: str, block_ids: Iterable[int]) -> None:
        """Fill blocks with junk."""
        for block_id in block_ids:
            self.cells[tier][block_id] = self.junk()

    def start(self, source_tier: str, destination_tier: str, pairs: list[Pair]) -> None:
        """Copies were planned."""
        if self.mode == "early":
            self._copy(source_tier, destination_tier, pairs)

    def finish(self, source_tier: str, destination_tier: str, pairs: list[Pair], failed: set[int]) -> None:
        """Copies were acknowledged by all ranks; failed ones leave junk at their destination."""
        if self.mode == "late":
            self._copy(source_tier, destination_tier, pairs)
        self.spoil(destination_tier, (pairs[index][1] for index in failed))

    def _copy(self, source_tier: str, destination_tier: str, pairs: list[Pair]) -> None:
        for source, destination in pairs:
            self.cells[destination_tier][destination] = self.cells[source_tier][source]
