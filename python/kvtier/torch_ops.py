"""Custom operators of torch: `torch.ops.kvtier.load_blocks` and `torch.ops.kvtier.store_blocks`.

Importing this module imports torch and registers them; `import kvtier` does neither. They are for programs that torch
traces or compiles: they copy tensors on CPU at once, on the calling thread, with torch's own indexing. `CopyEngine` is
what copies in the background.

`gpu` is a list of tensors, one per layer for instance, of which dimension `block_dim` counts blocks; `host` has shape
(host blocks, block bytes), uint8, and keeps the fragments of a block in the order of `MemoryLayout.from_tensors`.
`pairs` has shape (n, 2), int32 or int64, rows (source block id, destination block id).
"""

from __future__ import annotations

import math

import torch

from kvtier.errors import ConfigError

__all__ = ["load_blocks", "store_blocks"]

_OP_DEVICES = "cpu"


@torch.library.custom_op("kvtier::load_blocks", mutates_args=("gpu",), device_types=_OP_DEVICES)
def load_blocks(gpu: list[torch.Tensor], host: torch.Tensor, pairs: torch.Tensor, block_dim: int = 0) -> None:
    """Copy blocks of `host` into `gpu`: pairs of (host block id, gpu block id).

    Raises:
        ConfigError: A shape or dtype is not as the module says, an id is outside its side, or a destination occurs
            twice. Nothing was copied.
    """
    _check_shapes(gpu, host, pairs, block_dim)
    sources, destinations = _ids(pairs, host.shape[0], gpu[0].shape[block_dim])
    if not len(sources):
        return
    start = 0
    for tensor in gpu:
        blocks = tensor.movedim(block_dim, 0)
        end = start + _bytes_per_block(tensor, block_dim)
        # A clone starts at offset 0 of its storage, as a view of another dtype needs.
        rows = host[sources, start:end].clone(memory_format=torch.contiguous_format)
        blocks[destinations] = rows.view(tensor.dtype).reshape(len(sources), *blocks.shape[1:])
        start = end


@torch.library.custom_op("kvtier::store_blocks", mutates_args=("host",), device_types=_OP_DEVICES)
def store_blocks(gpu: list[torch.Tensor], host: torch.Tensor, pairs: torch.Tensor, block_dim: int = 0) -> None:
    """Copy blocks of `gpu` into `host`: pairs of (gpu block id, host block id).

    Raises:
        ConfigError: As `load_blocks`.
    """
    _check_shapes(gpu, host, pairs, block_dim)
    sources, destinations = _ids(pairs, gpu[0].shape[block_dim], host.shape[0])
    if not len(sources):
        return
    start = 0
    for tensor in gpu:
        end = start + _bytes_per_block(tensor, block_dim)
        rows = tensor.movedim(block_dim, 0)[sources].contiguous().reshape(len(sources), -1)
        host[destinations, start:end] = rows.view(torch.uint8)
        start = end


@load_blocks.register_fake
def _fake_load(gpu: list[torch.Tensor], host: torch.Tensor, pairs: torch.Tensor, block_dim: int = 0) -> None:
    _check_shapes(gpu, host, pairs, block_dim)


@store_blocks.register_fake
def _fake_store(gpu: list[torch.Tensor], host: torch.Tensor, pairs: torch.Tensor, block_dim: int = 0) -> None:
    _check_shapes(gpu, host, pairs, block_dim)


def _bytes_per_block(tensor: torch.Tensor, block_dim: int) -> int:
    return math.prod(size for dim, size in enumerate(tensor.shape) if dim != block_dim) * tensor.element_size()


def _check_shapes(gpu: list[torch.Tensor], host: torch.Tensor, pairs: torch.Tensor, block_dim: int) -> None:
    """Refuse what can be told without looking at values; the fake operators do no more."""
    if not gpu:
        raise ConfigError("gpu", "[]", "at least one tensor")
    for index, tensor in enumerate(gpu):
        name = f"gpu[{index}].shape"
        if not 0 <= block_dim < tensor.dim():
            raise ConfigError("block_dim", block_dim, f"0 .. {tensor.dim() - 1}, a dimension of gpu[{index}]")
        if tensor.shape[block_dim] != gpu[0].shape[block_dim]:
            raise ConfigError(name, tuple(tensor.shape), f"{gpu[0].shape[block_dim]} blocks, as gpu[0]")
    block_bytes = sum(_bytes_per_block(tensor, block_dim) for tensor in gpu)
    if host.dtype != torch.uint8:
        raise ConfigError("host.dtype", host.dtype, "torch.uint8")
    if host.dim() != 2 or host.shape[1] != block_bytes:
        raise ConfigError("host.shape", tuple(host.shape), f"(host blocks, {block_bytes}), the bytes of a gpu block")
    if pairs.dtype not in (torch.int32, torch.int64):
        raise ConfigError("pairs.dtype", pairs.dtype, "torch.int32 or torch.int64")
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ConfigError("pairs.shape", tuple(pairs.shape), "(n, 2): (source block id, destination block id)")


def _ids(pairs: torch.Tensor, num_sources: int, num_destinations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and destinations as int64, each inside its side and each destination once."""
    sources, destinations = pairs.long().unbind(1)
    for name, ids, limit in (("source", sources, num_sources), ("destination", destinations, num_destinations)):
        outside = ((ids < 0) | (ids >= limit)).nonzero()
        if len(outside):
            index = int(outside[0])
            raise ConfigError(f"pairs[{index}]", tuple(pairs[index].tolist()), f"a {name} in 0 .. {limit - 1}")
    if len(destinations.unique()) != len(destinations):
        raise ConfigError("pairs", f"{len(destinations)} pairs", "each destination once")
    return sources, destinations
