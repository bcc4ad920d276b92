"""Planning of a table's capacity in bytes: what fits, and in so many words what does not."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvtier.errors import ConfigError
from kvtier.host_memory import available_host_bytes

if TYPE_CHECKING:
    from kvtier import BlockTable

__all__ = ["HOST_PAGE_BYTES", "TableConfig", "available_host_bytes"]

HOST_PAGE_BYTES = 4096
"""The host memory of a block starts on a page of this size, so it takes a whole number of them."""

_MAX_BLOCKS = 2**24
_MAX_BLOCK_SIZE = 2**16
_MAX_RANKS = 32
_MAX_BYTES = 2**63 - 1
_DERIVED = cast("int", None)


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Sizes of a block table, checked against the memory of the node that it is for.

    A *rank* is one worker with its own Gpu and its own part of every block's KV; a *node* is a machine with
    `local_ranks` of them. All ranks of an engine share one table, so both tiers have as many blocks on each rank.
    Attributes that may be left out hold what was derived for them.

    Attributes:
        gpu_blocks: Blocks of the Gpu tier, 1 .. 2**24.
        block_size: Tokens per block, 1 .. 65536.
        block_bytes: Bytes that the KV of one block takes on one rank, all layers together.
        cpu_bytes: Host memory for the Cpu tier, per node: it is divided evenly over the local ranks. Left out: what
            `cpu_blocks` takes.
        cpu_blocks: Blocks of the Cpu tier, 0 .. 2**24; 0 makes a plain prefix cache. Left out: what `cpu_bytes` holds.
        local_ranks: Ranks on this node, 1 .. 32.
        cpu_block_size: Tokens per block of the Cpu tier: the same as `block_size`.
        node_budget_bytes: Host memory that all ranks of the node may take together. Left out: what
            `available_host_bytes` says.

    Raises:
        ConfigError: An argument is outside its limits; the text says whether the limit is per rank or per node.
    """

    gpu_blocks: int
    block_size: int
    block_bytes: int
    cpu_bytes: int = _DERIVED
    cpu_blocks: int = _DERIVED
    local_ranks: int = 1
    cpu_block_size: int = _DERIVED
    node_budget_bytes: int = _DERIVED

    def __post_init__(self) -> None:
        self._check("gpu_blocks", 1, _MAX_BLOCKS, "per rank")
        self._check("block_size", 1, _MAX_BLOCK_SIZE, "tokens")
        self._check("block_bytes", 1, _MAX_BYTES, "per rank")
        self._check("local_ranks", 1, _MAX_RANKS, "per node")
        self._check_cpu_block_size()
        if self.node_budget_bytes is None:
            self._set("node_budget_bytes", available_host_bytes())
        self._check("node_budget_bytes", 0, _MAX_BYTES, "per node")
        if self.cpu_bytes is None and self.cpu_blocks is None:
            raise ConfigError("cpu_blocks", None, "give cpu_blocks (per rank; 0: no Cpu tier) or cpu_bytes (per node)")
        if self.cpu_bytes is not None:
            self._derive_cpu_blocks()
        else:
            self._check_cpu_blocks()
            self._set("cpu_bytes", self.cpu_bytes_per_node)

    def _derive_cpu_blocks(self) -> None:
        block_bytes, ranks = self.cpu_block_bytes, self.local_ranks
        least = (
            f"per node: at least {block_bytes * ranks}, one block of {block_bytes} bytes on each of {ranks} local "
            f"ranks (for no Cpu tier leave it out and give cpu_blocks=0)"
        )
        cpu_bytes = checked_integer("cpu_bytes", self.cpu_bytes, least)
        if cpu_bytes < block_bytes * ranks:
            if cpu_bytes == self.cpu_blocks == 0:  # what a config without a Cpu tier says of itself
                return
            raise ConfigError("cpu_bytes", cpu_bytes, least)
        if cpu_bytes > self.node_budget_bytes:
            raise ConfigError("cpu_bytes", cpu_bytes, f"per node: at most {self.node_budget_bytes}, node_budget_bytes")
        blocks = cpu_bytes // ranks // block_bytes
        if blocks > _MAX_BLOCKS:
            most = (_MAX_BLOCKS + 1) * block_bytes * ranks - 1
            limit = f"per node: at most {most}, which makes {_MAX_BLOCKS} blocks on each of {ranks} local ranks"
            raise ConfigError("cpu_bytes", cpu_bytes, limit)
        if self.cpu_blocks is not None and self.cpu_blocks != blocks:
            limit = f"per rank: {blocks}, which cpu_bytes = {cpu_bytes} makes; give one of the two"
            raise ConfigError("cpu_blocks", self.cpu_blocks, limit)
        self._set("cpu_bytes", cpu_bytes)
        self._set("cpu_blocks", blocks)

    def _check_cpu_blocks(self) -> None:
        self._check("cpu_blocks", 0, _MAX_BLOCKS, "per rank")
        if self.cpu_bytes_per_node > self.node_budget_bytes:
            most = self.node_budget_bytes // (self.cpu_block_bytes * self.local_ranks)
            limit = (
                f"per rank: at most {most}, since {self.local_ranks} local ranks with blocks of "
                f"{self.cpu_block_bytes} bytes share node_budget_bytes = {self.node_budget_bytes} (per node)"
            )
            raise ConfigError("cpu_blocks", self.cpu_blocks, limit)

    def _check_cpu_block_size(self) -> None:
        if self.cpu_block_size is None:
            self._set("cpu_block_size", self.block_size)
        self._check("cpu_block_size", 1, _MAX_BLOCK_SIZE, "tokens")
        if self.cpu_block_size == self.block_size:
            return
        wrong = "is not a multiple of" if self.cpu_block_size % self.block_size else "differs from"
        limit = f"{wrong} block_size = {self.block_size}; on every rank it has to be equal to it"
        raise ConfigError("cpu_block_size", self.cpu_block_size, limit)

    def _check(self, name: str, low: int, high: int, scope: str) -> None:
        limit = f"{scope}: {low} .. {high}"
        value = checked_integer(name, getattr(self, name), limit)
        if not low <= value <= high:
            raise ConfigError(name, value, limit)
        self._set(name, value)

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)  # the way to fill a field of a frozen class while it is being made

    @property
    def cpu_block_bytes(self) -> int:
        """Bytes of host memory that one block takes on one rank: `block_bytes` up to a whole number of pages."""
        return -(-self.block_bytes // HOST_PAGE_BYTES) * HOST_PAGE_BYTES

    @property
    def gpu_bytes_per_rank(self) -> int:
        """Bytes of the Gpu tier on one rank."""
        return self.gpu_blocks * self.block_bytes

    @property
    def gpu_bytes_per_node(self) -> int:
        """Bytes of the Gpu tier on all local ranks."""
        return self.gpu_bytes_per_rank * self.local_ranks

    @property
    def cpu_bytes_per_rank(self) -> int:
        """Bytes of host memory that the Cpu tier takes for one rank."""
        return self.cpu_blocks * self.cpu_block_bytes

    @property
    def cpu_bytes_per_node(self) -> int:
        """Bytes of host memory that the Cpu tier takes for all local ranks: at most `cpu_bytes`."""
        return self.cpu_bytes_per_rank * self.local_ranks

    def table(self, **options: Any) -> BlockTable:
        """Make a table of these sizes.

        Args:
            **options: Further arguments of `BlockTable`. `ranks` is `local_ranks` unless given; an engine that spans
                nodes has more.

        Raises:
            ConfigError: An option is outside its limits.
        """
        from kvtier import BlockTable

        options.setdefault("ranks", self.local_ranks)
        return BlockTable(self.gpu_blocks, self.cpu_blocks, self.block_size, **options)


def checked_integer(name: str, value: object, limit: str) -> int:
    """The value as an int, which whoever knows the limit still has to compare with it.

    Raises:
        ConfigError: It is no integer.
    """
    if isinstance(value, bool):
        raise ConfigError(name, value, f"has to be an integer ({limit})")
    try:
        return operator.index(cast("int", value))
    except TypeError:
        raise ConfigError(name, repr(value), f"has to be an integer ({limit})") from None
