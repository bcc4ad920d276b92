"""Layouts of scenario S12, each as a buffer with guards around everything that a copy may touch."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

BLOCKS = 16
GUARD = 64
GUARD_BYTE = 0xEE


def torch_or_skip() -> Any:
    """Torch; skips where it is missing, unless KVTIER_REQUIRE_TORCH says that it must be there."""
    if os.environ.get("KVTIER_REQUIRE_TORCH"):
        return importlib.import_module("torch")
    return pytest.importorskip("torch", reason="torch is not installed")


@dataclass
class Layout:
    """One layout: the whole buffer, and the tensors in it as they are given to the engine."""

    name: str
    storage: np.ndarray
    """All bytes, guards and padding included: shape (bytes,), uint8."""
    tensors: list[np.ndarray]
    block_dim: int
    fragments: int

    def block(self, block: int) -> list[np.ndarray]:
        """The fragments of a block, in the order in which the host side keeps them."""
        parts = []
        for tensor in self.tensors:
            outer = tensor.shape[: self.block_dim]
            parts += [tensor[(*index, block)] for index in np.ndindex(*outer)]
        return parts

    def block_bytes(self, block: int) -> bytes:
        return b"".join(part.tobytes() for part in self.block(block))

    def used(self) -> np.ndarray:
        """Which bytes of the storage belong to a block: shape (bytes,), bool."""
        before = self.storage.copy()
        self.storage[:] = 0
        for tensor in self.tensors:
            tensor[...] = 1
        used = self.storage == 1
        self.storage[:] = before
        return used

    def fill(self) -> None:
        """Guards and padding, then a pattern of (block, layer, K/V, byte)."""
        self.storage[:] = GUARD_BYTE
        for block in range(BLOCKS):
            for number, part in enumerate(self.block(block)):
                flat = np.arange(part.size).reshape(part.shape)
                part[...] = (block * 31 + number * 101 + flat * 7 + flat // 256) % 251


def _carve(storage: np.ndarray, start: int, shape: tuple[int, ...], block_stride: int | None = None) -> np.ndarray:
    """A view of the storage; `block_stride` bytes from block to block if the first dimension is padded."""
    view = storage[start : start + int(np.prod(shape))].reshape(shape)
    if block_stride is None:
        return view
    strides = (block_stride, *view.strides[1:])
    return np.lib.stride_tricks.as_strided(storage[start:], shape, strides)


def make_layout(name: str) -> Layout:
    """L1 to L6 of scenario S12, filled; 16 blocks each."""

    def one(shape: tuple[int, ...], block_dim: int, fragments: int, start: int = GUARD) -> Layout:
        storage = np.zeros(start + int(np.prod(shape)) + GUARD, np.uint8)
        return Layout(name, storage, [_carve(storage, start, shape)], block_dim, fragments)

    if name == "L1":  # block first: (blocks, layers, K/V, tokens, heads, size)
        layout = one((BLOCKS, 2, 2, 4, 2, 32), 0, 1)
    elif name == "L1-page":  # the same, a block being exactly a host slot
        layout = one((BLOCKS, 2, 2, 4, 2, 128), 0, 1)
    elif name == "L2":  # K/V first: (K/V, blocks, tokens, heads, size)
        layout = one((2, BLOCKS, 4, 2, 40), 1, 2)
    elif name == "L3":  # block stride 640, 576 used
        storage = np.zeros(GUARD + BLOCKS * 640 + GUARD, np.uint8)
        layout = Layout(name, storage, [_carve(storage, GUARD, (BLOCKS, 4, 144), 640)], 0, 1)
    elif name == "L4":  # three separate layer tensors, guards between them
        storage = np.zeros(GUARD + 3 * (BLOCKS * 512 + GUARD), np.uint8)
        starts = [GUARD + layer * (BLOCKS * 512 + GUARD) for layer in range(3)]
        layout = Layout(name, storage, [_carve(storage, start, (BLOCKS, 2, 256)) for start in starts], 0, 3)
    elif name == "L5":  # a view that starts inside its storage, at an odd address
        layout = one((2, BLOCKS, 4, 2, 24), 1, 2, start=GUARD + 4093)
    elif name == "L6-block-first":  # two readings of one shape: only block_dim tells them apart
        layout = one((BLOCKS, BLOCKS, 2, 16), 0, 1)
    elif name == "L6-block-second":
        layout = one((BLOCKS, BLOCKS, 2, 16), 1, 16)
    else:
        raise KeyError(name)
    layout.fill()
    return layout


LAYOUTS = ["L1", "L1-page", "L2", "L3", "L4", "L5", "L6-block-first", "L6-block-second"]
