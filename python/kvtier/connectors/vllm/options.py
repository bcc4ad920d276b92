"""The options of the connector: the keys of `kv_connector_extra_config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the connector; docs/vllm.md has the table.

    Attributes:
        host_gib: Host memory of the Cpu tier in GiB, per node, divided evenly over the ranks; above 0.
        policy: Eviction policy: `lru`.
        store_mode: When blocks are stored: `eager`, as soon as they are full.
        max_store_blocks_per_step: Most blocks that one step begins to store, 1 or more. None: no limit.
        min_hit_tokens: Shortest prefix worth loading, in tokens, 0 or more.
        copy_threads: Threads that copy, per rank, 1 .. 64.
        metrics: Whether statistics go to vLLM's metrics.
    """

    host_gib: float
    policy: str = "lru"
    store_mode: str = "eager"
    max_store_blocks_per_step: int | None = None
    min_hit_tokens: int = 0
    copy_threads: int = 1
    metrics: bool = True

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Check the options that the user gave.

        Raises:
            ConfigError: An option is unknown, missing or outside its limits.
        """
        given = dict(given or {})
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config[{name!r}]", given[name], f"one of: {', '.join(known)}")
        if "host_gib" not in given:
            raise ConfigError("host_gib", None, "GiB of host memory for the node, above 0; it has no default")
        return cls(**given)

    def __post_init__(self) -> None:
        if not _is_number(self.host_gib) or not 0 < self.host_gib < math.inf:
            raise ConfigError("host_gib", repr(self.host_gib), "a number of GiB above 0, per node")
        for name, choice in (("policy", "lru"), ("store_mode", "eager")):
            if getattr(self, name) != choice:
                raise ConfigError(name, repr(getattr(self, name)), f"one of: {choice!r}")
        if self.max_store_blocks_per_step is not None:
            self._check("max_store_blocks_per_step", 1, 2**24)
        self._check("min_hit_tokens", 0, 2**31 - 1)
        self._check("copy_threads", 1, 64)
        if not isinstance(self.metrics, bool):
            raise ConfigError("metrics", repr(self.metrics), "True or False")

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(name, repr(value), f"an integer in {low} .. {high}")

    def num_cpu_blocks(self, block_bytes: int, local_ranks: int) -> int:
        """Blocks of the Cpu tier on each rank.

        Args:
            block_bytes: Bytes of a block on one rank.
            local_ranks: Ranks of the node.

        Raises:
            ConfigError: Not one block fits.
        """
        slot_bytes = -(-block_bytes // 4096) * 4096
        blocks = int(self.host_gib * _GIB) // local_ranks // slot_bytes
        if blocks < 1:
            limit = f"at least {slot_bytes * local_ranks / _GIB:g}: one block on each of {local_ranks} ranks"
            raise ConfigError("host_gib", self.host_gib, limit)
        return min(blocks, 2**24)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
