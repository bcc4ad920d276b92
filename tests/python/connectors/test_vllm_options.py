"""Options of the vLLM connector; without vLLM."""

from types import SimpleNamespace

import pytest
from kvtier.connectors.vllm.options import Options, local_replicas
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (None, "host_gib"),
        ({}, "host_gib"),
        ({"host_gib": -1}, "host_gib"),
        ({"host_gib": 0}, "host_gib"),
        ({"host_gib": float("inf")}, "host_gib"),
        ({"host_gib": float("nan")}, "host_gib"),
        ({"host_gib": "64"}, "host_gib"),
        ({"host_gib": True}, "host_gib"),
        ({"host_gib": 1, "store_mode": "sometimes"}, "store_mode"),
        ({"host_gib": 1, "policy": "fifo"}, "policy"),
        ({"host_gib": 1, "load_choice": "never"}, "load_choice"),
        ({"host_gib": 1, "copy_threads": 0}, "copy_threads"),
        ({"host_gib": 1, "copy_threads": 65}, "copy_threads"),
        ({"host_gib": 1, "copy_threads": 1.0}, "copy_threads"),
        ({"host_gib": 1, "copy_threads": True}, "copy_threads"),
        ({"host_gib": 1, "min_hit_tokens": -1}, "min_hit_tokens"),
        ({"host_gib": 1, "max_store_bytes_per_step": 0}, "max_store_bytes_per_step"),
        ({"host_gib": 1, "max_load_bytes_per_step": "1G"}, "max_load_bytes_per_step"),
        ({"host_gib": 1, "replicas_per_node": 0}, "replicas_per_node"),
        ({"host_gib": 1, "same_step_loads": 1}, "same_step_loads"),
        ({"host_gib": 1, "colour": 3}, "colour"),
        ({"host_gib": 1, "metrics": 1}, "metrics"),
    ],
)
def test_options_are_refused_by_name(options, name):
    with pytest.raises(ConfigError, match=name):
        Options.parse(options)


def test_host_memory_is_divided_over_the_ranks_in_whole_slots():
    options = Options.parse({"host_gib": 1})
    # Slots of the host memory are whole pages.
    assert options.num_cpu_blocks(4096, 1) == 2**30 // 4096
    assert options.num_cpu_blocks(4097, 1) == 2**30 // 8192
    assert options.num_cpu_blocks(4096, 2) == 2**29 // 4096
    with pytest.raises(ConfigError, match="host_gib"):
        options.num_cpu_blocks(2**30, 2)


def test_a_budget_holds_a_block():
    options = Options.parse({"host_gib": 1, "max_load_bytes_per_step": 8191})
    assert options.step_blocks("max_load_bytes_per_step", 4096) == 1
    assert options.step_blocks("max_store_bytes_per_step", 4096) is None
    with pytest.raises(ConfigError, match="max_load_bytes_per_step"):
        options.step_blocks("max_load_bytes_per_step", 8192)


def parallel(size=1, local=1, external=False):
    return SimpleNamespace(data_parallel_size=size, data_parallel_size_local=local, data_parallel_external_lb=external)


def test_replicas_are_counted_or_asked_for():
    given = Options.parse({"host_gib": 1, "replicas_per_node": 4})
    silent = Options.parse({"host_gib": 1})
    assert local_replicas(given, parallel(), None) == 4
    assert local_replicas(silent, parallel(), "engine") == 1
    assert local_replicas(silent, parallel(4, 2), None) == 2
    for config, engine in [(parallel(4, 1, external=True), None), (parallel(), "engine_dp1")]:
        with pytest.raises(ConfigError, match="replicas_per_node"):
            local_replicas(silent, config, engine)
