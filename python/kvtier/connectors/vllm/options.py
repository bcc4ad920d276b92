"""The options of the connector: the keys of `kv_connector_extra_config`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options", "local_replicas"]

_GIB = 2**30
_CHOICES = {
    "policy": ("lru",),
    "store_mode": ("eager", "lazy", "second_use"),
    "load_choice": ("measured", "always"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the connector; docs/vllm.md has the table.

    Attributes:
        host_gib: Host memory of the Cpu tier in GiB, per node, divided evenly over the ranks of all replicas; above 0.
        replicas_per_node: Engines of data parallelism on one node, 1 or more. None: what vLLM says.
        policy: Eviction policy: `lru`.
        store_mode: When blocks are stored: `eager`, as soon as they are full; `lazy`, when vLLM is about to reuse
            them; `second_use`, when a second request uses them.
        max_store_bytes_per_step: Most bytes that one step begins to store, per rank. None: no limit.
        max_load_bytes_per_step: Most bytes that one step begins to load, per rank, but for a single request that needs
            more. None: no limit.
        min_hit_tokens: Shortest prefix worth loading, in tokens, 0 or more.
        load_choice: `measured`: prefixes that are computed sooner than loaded are computed; `always`: load every one.
        same_step_loads: Whether a load may be waited for within a step, where that is cheaper than another step.
        copy_threads: Threads that copy, per rank, 1 .. 64.
        metrics: Whether statistics go to vLLM's metrics.
    """

    host_gib: float
    replicas_per_node: int | None = None
    policy: str = "lru"
    store_mode: str = "eager"
    max_store_bytes_per_step: int | None = None
    max_load_bytes_per_step: int | None = None
    min_hit_tokens: int = 0
    load_choice: str = "measured"
    same_step_loads: bool = True
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
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(name, repr(getattr(self, name)), f"one of: {', '.join(map(repr, choices))}")
        for name in ("max_store_bytes_per_step", "max_load_bytes_per_step"):
            if getattr(self, name) is not None:
                self._check(name, 1, 2**62)
        if self.replicas_per_node is not None:
            self._check("replicas_per_node", 1, 1024)
        self._check("min_hit_tokens", 0, 2**31 - 1)
        self._check("copy_threads", 1, 64)
        for name in ("metrics", "same_step_loads"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, repr(getattr(self, name)), "True or False")

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(name, repr(value), f"an integer in {low} .. {high}")

    def num_cpu_blocks(self, block_bytes: int, local_ranks: int) -> int:
        """Blocks of the Cpu tier on each rank.

        Args:
            block_bytes: Bytes of a block on one rank.
            local_ranks: Ranks of the node, those of all replicas together.

        Raises:
            ConfigError: Not one block fits.
        """
        slot_bytes = -(-block_bytes // 4096) * 4096
        blocks = int(self.host_gib * _GIB) // local_ranks // slot_bytes
        if blocks < 1:
            limit = f"at least {slot_bytes * local_ranks / _GIB:g}: one block on each of {local_ranks} ranks"
            raise ConfigError("host_gib", self.host_gib, limit)
        return min(blocks, 2**24)

    def step_blocks(self, name: str, block_bytes: int) -> int | None:
        """A budget of bytes in blocks.

        Args:
            name: `max_store_bytes_per_step` or `max_load_bytes_per_step`.
            block_bytes: Bytes of a block on one rank.

        Raises:
            ConfigError: Not one block fits, so that nothing would ever be copied.
        """
        num_bytes: int | None = getattr(self, name)
        if num_bytes is None:
            return None
        if num_bytes < block_bytes:
            raise ConfigError(name, num_bytes, f"at least {block_bytes}, the bytes of one block on a rank")
        return num_bytes // block_bytes


def local_replicas(options: Options, parallel: Any, engine_id: str | None) -> int:
    """Engines of data parallelism that share this node's host memory.

    An engine of a dense model is told by vLLM that it is alone; the end of its `engine_id` still shows that it is not,
    but not how many there are.

    Args:
        options: The user's options.
        parallel: vLLM's `ParallelConfig`.
        engine_id: Of vLLM's `KVTransferConfig`.

    Raises:
        ConfigError: There is data parallelism, and neither vLLM nor the user says how many replicas share the node.
    """
    if options.replicas_per_node is not None:
        return options.replicas_per_node
    size, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    if size > 1 and local >= 1 and not parallel.data_parallel_external_lb:
        return int(local)
    if size > 1 or re.search(r"_dp\d+$", engine_id or ""):
        limit = "the number of data-parallel engines on one node: host_gib is divided over them, and vLLM does not say"
        raise ConfigError("replicas_per_node", None, limit)
    return 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
