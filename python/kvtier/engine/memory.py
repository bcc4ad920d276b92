"""Paged KV memory: one tensor, one contiguous piece per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtier.errors import ConfigError
from kvtier.host_memory import available_host_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Segment:
    """The tokens of one request that one forward pass computes: positions `start .. end - 1`.

    Attributes:
        block_ids: The request's Gpu block ids, in order; they cover at least `end` tokens.
        start: First position to compute; the KV of everything before it is in memory.
        end: One past the last position to compute.
    """

    block_ids: Sequence[int]
    start: int
    end: int


class KvMemory:
    """Keys and values of all layers, in `num_blocks` blocks of `block_size` tokens.

    Attributes:
        tensor: Shape (num_blocks, layers, 2, block_size, kv_heads, head_dim). The block is the outermost dimension, so
            a block with all its layers is one contiguous piece and a copy between the tiers is one piece per block.
        block_size: Tokens per block.
        block_bytes: Bytes per block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory.

        Raises:
            ConfigError: The device cannot hold that many blocks.
        """
        shape = (num_blocks, layers, 2, block_size, kv_heads, head_dim)
        if device.type == "cpu":
            self.tensor = host_zeros("gpu_blocks", shape, dtype)
        else:
            try:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                needed = torch.Size(shape).numel() * dtype.itemsize
                limit = f"the {needed} bytes they need cannot be allocated on {device}"
                raise ConfigError("gpu_blocks", num_blocks, limit) from error
        self.block_size = block_size
        self.block_bytes = self.tensor[0].numel() * dtype.itemsize

    def write(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the keys and values of n tokens of one layer into their places.

        Args:
            layer: The layer.
            blocks: Block id of each token: shape (n,), int64.
            offsets: Place of each token inside its block: shape (n,), int64.
            k: Keys: shape (n, kv_heads, head_dim).
            v: Values, as `k`.
        """
        self.tensor[blocks, layer, 0, offsets] = k
        self.tensor[blocks, layer, 1, offsets] = v

    def read(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the first `num_tokens` keys and values of one request, for one layer.

        Args:
            layer: The layer.
            blocks: Block ids that cover these tokens, in order: int64.
            num_tokens: Tokens wanted.

        Returns:
            Keys and values: each of shape (kv_heads, num_tokens, head_dim), a copy.
        """
        kv = self.tensor[blocks, layer]  # (blocks, 2, block_size, kv_heads, head_dim)
        k, v = (kv[:, i].flatten(0, 1)[:num_tokens].transpose(0, 1) for i in (0, 1))
        return k, v


def host_zeros(argument: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in host memory, refused if the machine or its container does not have that much.

    The kernel would promise any amount and then end the process that uses it.

    Args:
        argument: What a refusal names; its value is the first dimension.
        shape: Shape of the tensor.
        dtype: Its element type.

    Raises:
        ConfigError: It needs more than is available.
    """
    needed, available = torch.Size(shape).numel() * dtype.itemsize, available_host_bytes()
    if needed > available:
        raise ConfigError(argument, shape[0], f"they need {needed} bytes of host memory, {available} are available")
    return torch.zeros(shape, dtype=dtype)
