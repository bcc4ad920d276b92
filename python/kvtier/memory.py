"""Described memory: where the blocks of the engine are, and the host memory that they are copied to.

The layout of the engine's memory is given, never guessed from a shape: see `MemoryLayout.from_tensors`.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from typing import TYPE_CHECKING, Any

from kvtier._core import DescribedMemory, HostArena
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

__all__ = ["HostMemory", "MemoryLayout"]

_MAX_FRAGMENTS = 4096


class MemoryLayout:
    """Where the bytes of each block of an engine's paged memory are.

    A block is a list of fragments, for instance one per layer. Fragment f of block b has `bytes` bytes at
    `address + b * block_stride`; what is between them is never read nor written. The host side keeps the fragments of a
    block in the order of the list. Fragments that follow each other without a gap in every block are joined.

    The object keeps the memory allocated.

    Args:
        fragments: Per fragment (address, block stride in bytes, bytes).
        num_blocks: Blocks, 1 .. 2**24.
        owner: Whatever keeps the memory allocated; held as long as a copy may touch it.
        device: CUDA device that the memory is on; None: host memory.

    Raises:
        ConfigError: A value is outside its limits, or two fragments have a byte in common.
    """

    def __init__(
        self, fragments: Iterable[tuple[int, int, int]], num_blocks: int, owner: object, device: int | None = None
    ) -> None:
        listed = list(fragments)
        self._described = DescribedMemory(listed, num_blocks)
        self._owner = owner
        self._device = device
        self._layer_ends = list(itertools.accumulate(size for _, _, size in listed))

    @classmethod
    def from_tensors(cls, tensors: Iterable[Any], block_dim: int = 0) -> MemoryLayout:
        """Describe torch tensors, in host memory or on one CUDA device, or numpy arrays, for instance one per layer.

        Dimension `block_dim` counts blocks. What comes after it is the inside of a block and has to be contiguous; each
        index of what comes before it is a fragment of its own. So a layer of shape (blocks, 2, tokens, heads, size) has
        `block_dim=0` and one fragment, a layer of shape (2, blocks, tokens, heads, size), keys and values first, has
        `block_dim=1` and two. Views are taken as they are: with an offset into their storage, with padding between
        blocks.

        Args:
            tensors: Tensors with the same number of blocks, not necessarily of the same shape or dtype; or one tensor.
            block_dim: Dimension that counts blocks, the same in each tensor.

        Raises:
            ConfigError: A tensor is elsewhere, is read-only, has another number of blocks, or its block is
                not contiguous; or two tensors share bytes.
        """
        listed = [tensors] if hasattr(tensors, "__array_interface__") or hasattr(tensors, "data_ptr") else list(tensors)
        if not listed:
            raise ConfigError("tensors", "[]", "at least one tensor")
        try:
            block_dim = operator.index(block_dim)
        except TypeError:
            raise TypeError(f"block_dim: an int is wanted, not {type(block_dim).__name__}") from None
        fragments: list[tuple[int, int, int]] = []
        owners: list[object] = []
        layer_ends: list[int] = []
        device: int | None = None
        num_blocks: int | None = None
        for index, tensor in enumerate(listed):
            view = _View(f"tensors[{index}]", tensor)
            fragments += view.fragments(block_dim)
            owners.append(view.owner)
            layer_ends.append(sum(size for _, _, size in fragments))
            if index == 0:
                device = view.device
            elif view.device != device:
                raise ConfigError(
                    f"{view.name}.device", _device_name(view.device), f"{_device_name(device)}, as tensors[0]"
                )
            blocks = view.shape[block_dim]
            if num_blocks is not None and blocks != num_blocks:
                raise ConfigError(f"{view.name}.shape", view.shape, f"{num_blocks} blocks, as tensors[0]")
            num_blocks = blocks
        assert num_blocks is not None
        try:
            layout = cls(fragments, num_blocks, owners, device)
        except ConfigError as error:
            raise ConfigError("tensors", error.value, f"{error.argument}: {error.limit}") from None
        layout._layer_ends = layer_ends
        return layout

    @property
    def num_blocks(self) -> int:
        """Blocks."""
        return self._described.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all fragments together, without padding."""
        return self._described.block_bytes

    @property
    def device(self) -> int | None:
        """CUDA device that the memory is on; None: host memory."""
        return self._device

    @property
    def layer_ends(self) -> list[int]:
        """Per layer, where its bytes end in a block; a layer is a tensor, or a fragment as it was given."""
        return list(self._layer_ends)

    @property
    def fragments(self) -> list[tuple[int, int, int]]:
        """Per fragment, after joining: (address, block stride in bytes, bytes)."""
        return self._described.fragments

    def __repr__(self) -> str:
        device = "" if self.device is None else f", device={self.device}"
        return (
            f"MemoryLayout(num_blocks={self.num_blocks}, block_bytes={self.block_bytes}, "
            f"fragments={len(self.fragments)}{device})"
        )


class HostMemory:
    """Memory of the Cpu tier: block-first slots, page-aligned, each rounded up to 4 KiB.

    All of it is touched at construction, so that no copy waits for the system to find a page, and zero. It is given
    back when neither this object, nor an array of it, nor a copy engine uses it.

    Args:
        num_blocks: Slots, 1 .. 2**24.
        block_bytes: Bytes of a block, 1 or more: `MemoryLayout.block_bytes`.

    Raises:
        ConfigError: A size is outside its limits, or the slots take more than the machine or its container allows.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        from kvtier.config import available_host_bytes

        slot_bytes, total = HostArena.sizes(num_blocks, block_bytes)
        available = available_host_bytes()
        if total > available:
            raise ConfigError(
                "num_blocks",
                f"{num_blocks} slots of {slot_bytes} bytes, {total} bytes together",
                f"at most {available // slot_bytes}: {available} bytes of host memory are available",
            )
        self._arena = HostArena(num_blocks, block_bytes)
        self._arena.touch()

    @property
    def num_blocks(self) -> int:
        """Slots."""
        return self._arena.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._arena.block_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: `block_bytes` rounded up to 4 KiB."""
        return self._arena.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_blocks * self.slot_bytes

    @property
    def address(self) -> int:
        """Address of slot 0."""
        return self._arena.address

    def array(self) -> npt.NDArray[np.uint8]:
        """The blocks as a writable view, without the padding: shape (num_blocks, block_bytes), uint8.

        The view keeps the memory, also when this object is gone.
        """
        import numpy as np

        slots = np.frombuffer(memoryview(self._arena), np.uint8).reshape(self.num_blocks, self.slot_bytes)
        return slots[:, : self.block_bytes]

    def __repr__(self) -> str:
        return f"HostMemory(num_blocks={self.num_blocks}, block_bytes={self.block_bytes})"


def _device_name(device: int | None) -> str:
    return "cpu" if device is None else f"cuda:{device}"


class _View:
    """Shape, strides and address of a tensor or array, strides in bytes."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.name = name
        self.device: int | None = None
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(tensor, torch.Tensor):
            self._take_tensor(torch, tensor)
        elif numpy is not None and isinstance(tensor, numpy.ndarray):
            self._take_array(tensor)
        else:
            raise ConfigError(name, type(tensor).__name__, "a torch.Tensor or a numpy.ndarray")
        if min(self.strides, default=0) < 0:
            raise ConfigError(f"{name}.strides", self.strides, "no negative strides")
        if 0 in self.shape:
            raise ConfigError(f"{name}.shape", self.shape, "at least one element in every dimension")

    def _take_tensor(self, torch: Any, tensor: Any) -> None:
        if tensor.layout != torch.strided:
            raise ConfigError(f"{self.name}.layout", tensor.layout, "torch.strided")
        if tensor.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"{self.name}.device", tensor.device, "cpu or cuda")
        self.device = tensor.device.index if tensor.device.type == "cuda" else None
        self.itemsize = tensor.element_size()
        self.shape = tuple(tensor.shape)
        self.strides = tuple(stride * self.itemsize for stride in tensor.stride())
        self.address = tensor.data_ptr()
        # A second tensor of the same storage: the first may be given another one later, by `tensor.data = ...`.
        self.owner: object = tensor.detach()

    def _take_array(self, array: npt.NDArray[Any]) -> None:
        if not array.flags.writeable:
            raise ConfigError(f"{self.name}.flags.writeable", False, "a writable array, since loads write it")
        if array.dtype.hasobject:
            raise ConfigError(f"{self.name}.dtype", array.dtype, "a dtype without Python objects")
        self.itemsize = array.dtype.itemsize
        self.shape, self.strides = array.shape, array.strides
        self.address = array.ctypes.data
        self.owner = array  # whoever resizes it in place now is refused by numpy

    def fragments(self, block_dim: int) -> list[tuple[int, int, int]]:
        """(address, block stride, bytes) per index of the dimensions before `block_dim`."""
        if not 0 <= block_dim < len(self.shape):
            limit = f"0 .. {len(self.shape) - 1}, a dimension of {self.name}, which has shape {self.shape}"
            raise ConfigError("block_dim", block_dim, limit)
        contiguous = self.itemsize
        for dim in reversed(range(block_dim + 1, len(self.shape))):
            if self.shape[dim] > 1 and self.strides[dim] != contiguous:
                limit = (
                    f"contiguous after dimension {block_dim}: dimension {dim} needs a stride of {contiguous} bytes, "
                    f"in shape {self.shape}"
                )
                raise ConfigError(f"{self.name}.strides", f"{self.strides} bytes", limit)
            contiguous *= self.shape[dim]
        outer = self.shape[:block_dim]
        if math.prod(outer) > _MAX_FRAGMENTS:
            limit = f"at most {_MAX_FRAGMENTS} fragments before dimension {block_dim}"
            raise ConfigError(f"{self.name}.shape", self.shape, limit)
        stride = self.strides[block_dim]
        starts = (
            self.address + sum(map(operator.mul, index, self.strides))
            for index in itertools.product(*map(range, outer))
        )
        return [(start, stride, contiguous) for start in starts]
