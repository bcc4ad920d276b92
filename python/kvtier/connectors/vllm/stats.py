"""The connector's statistics in vLLM's metrics; every name is declared here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["COUNTERS", "GAUGES", "PromStats", "Stats"]

COUNTERS = {
    "hit_blocks": "Blocks that lookups found in host memory",
    "lookup_blocks": "Blocks that lookups asked for",
    "loaded_blocks": "Blocks loaded from host memory",
    "load_failed_blocks": "Loads that failed; their blocks were computed",
    "stored_blocks": "Blocks stored in host memory",
    "store_failed_blocks": "Stores that failed; the blocks were forgotten",
    "known_blocks": "Blocks not stored because host memory had them",
    "over_budget_blocks": "Blocks not stored in their step for its budget",
    "no_slot_blocks": "Blocks not stored for want of a slot",
    "evicted_blocks": "Blocks evicted from host memory",
    "withdrawn_blocks": "Blocks withdrawn from host memory after a failed load",
}
"""Counters of `HostTable.stats` that are published as `vllm:kvtier_<name>_total`."""

GAUGES = {
    "cpu_blocks": "Slots in host memory",
    "cpu_cached_blocks": "Slots in host memory that hold a block",
    "num_tickets": "Copies under way",
}
"""Gauges of `HostTable.stats` that are published as `vllm:kvtier_<name>`."""


@dataclass
class Stats(KVConnectorStats):
    """Counters since the last interval and gauges of now, by name."""

    def __post_init__(self) -> None:
        self._last: dict[str, int] = {}

    def difference(self, now: dict[str, int]) -> Stats:
        """What `now` adds to the last call's."""
        data: dict[str, Any] = {name: now[name] - self._last.get(name, 0) for name in COUNTERS}
        self._last = now
        if not any(data.values()):
            return Stats()
        return Stats(data=data | {name: now[name] for name in GAUGES})

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Add a later interval."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class PromStats(KVConnectorPromMetrics):
    """The same for Prometheus."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def declare(kind: Any, names: dict[str, str]) -> dict[str, Any]:
            return {
                name: kind(name=f"vllm:kvtier_{name}", documentation=text, labelnames=labelnames)
                for name, text in names.items()
            }

        self._counters = declare(self._counter_cls, COUNTERS)
        self._gauges = declare(self._gauge_cls, GAUGES)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Publish one interval."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._gauges:
                self._gauges[name].labels(*labels).set(value)
