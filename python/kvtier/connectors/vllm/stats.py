"""The connector's statistics in vLLM's metrics; every name is declared here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["COUNTERS", "GAUGES", "PromStats", "Stats"]

COUNTERS = {
    "prompt_tokens": "Tokens of the prompts that were scheduled, those of resumed requests again",
    "gpu_hit_tokens": "Of these, tokens that vLLM found in its own cache",
    "host_hit_tokens": "Of these, tokens that were loaded from host memory, or were to be",
    "skipped_short_tokens": "Hits in host memory that were computed, being shorter than min_hit_tokens",
    "skipped_compute_tokens": "Hits in host memory that were computed, that being sooner done",
    "num_joined": "Requests that waited for the load of another",
    "num_deferred": "Requests that waited for the next step's budget of loads",
    "num_same_step_loads": "Loads within the step of their request",
    "lookup_blocks": "Blocks that lookups asked for",
    "hit_blocks": "Blocks that lookups found in host memory",
    "loaded_blocks": "Blocks loaded from host memory",
    "load_failed_blocks": "Loads that failed; their blocks were computed",
    "load_bytes": "Bytes loaded, of all ranks",
    "load_seconds": "Seconds of copy threads for loads, of all ranks",
    "stored_blocks": "Blocks stored in host memory",
    "store_failed_blocks": "Stores that failed or were given up; the blocks were forgotten",
    "store_bytes": "Bytes stored, of all ranks",
    "store_seconds": "Seconds of copy threads for stores, of all ranks",
    "known_blocks": "Blocks not stored because host memory had them",
    "over_budget_blocks": "Blocks not stored in their step for its budget",
    "no_slot_blocks": "Blocks not stored for want of a slot",
    "first_use_blocks": "Blocks not stored because they were used only once",
    "evicted_blocks": "Blocks evicted from host memory",
    "withdrawn_blocks": "Blocks withdrawn from host memory after a failed load",
}
"""Counters of `SchedulerSide.stats` that are published as `vllm:kvtier_<name>_total`."""

GAUGES = {
    "cpu_blocks": "Slots in host memory",
    "cpu_cached_blocks": "Slots in host memory that hold a block",
    "num_tickets": "Tickets of copies that not every rank has acknowledged",
    "queue_depth": "Tickets that wait or run in the ranks' copy engines",
    "is_without_tier": "1 after a copy engine has stopped for good: nothing is stored or loaded any more",
}
"""Gauges of `SchedulerSide.stats` that are published as `vllm:kvtier_<name>`."""


@dataclass
class Stats(KVConnectorStats):
    """Counters since the last interval and gauges of now, by name."""

    def __post_init__(self) -> None:
        self._last: dict[str, int | float] = {}

    def difference(self, now: dict[str, int | float]) -> Stats:
        """What `now` adds to the last call's."""
        data: dict[str, Any] = {name: now[name] - self._last.get(name, 0) for name in COUNTERS}
        gauges = {name: now[name] for name in GAUGES}
        is_same = not any(data.values()) and all(self._last.get(name) == value for name, value in gauges.items())
        self._last = now
        if is_same:
            return Stats()
        return Stats(data=data | gauges)

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
