"""Random calls: the twin, and where it is built the compiled core beside it, under the oracle's eyes."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import CORE
from kvtier.reference import ReferenceBlockTable
from random_driver import RandomDriver
from side_by_side import SideBySide

CALLS_PER_RUN = 400
NUM_RUNS = 80


def make(*sizes: int, **options):
    twin = ReferenceBlockTable(*sizes, **options)
    return twin if CORE is None else SideBySide(CORE(*sizes, **options), twin)


def test_random_calls():
    happened: Counter[str] = Counter()

    @settings(
        max_examples=NUM_RUNS,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        gpu_blocks=st.sampled_from([6, 8, 4, 12, 5, 3, 10, 1]),
        cpu_blocks=st.sampled_from([8, 12, 6, 16, 4, 2, 24, 0]),
        block_size=st.integers(1, 4),
        budget=st.sampled_from([None, None, None, None, 1, 2, 4, 0]),
        ranks=st.integers(1, 3),
        mode=st.sampled_from(["early", "late"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def run(gpu_blocks, cpu_blocks, block_size, budget, ranks, mode, seed):
        options = {"max_store_blocks_per_step": budget, "ranks": ranks}
        table = make(gpu_blocks, cpu_blocks, block_size, **options)
        driver = RandomDriver(table, mode, seed, **options)
        driver.run(CALLS_PER_RUN)
        happened.update(table.stats())
        happened["calls"] += CALLS_PER_RUN

    run()
    assert happened["calls"] >= 10_000
    # A test that never gets anywhere proves nothing: every path of interest was taken, often.
    for name in (
        "num_refused",
        "num_preempted",
        "num_resets",
        "num_stale_completions",
        "gpu_hit_blocks",
        "cpu_hit_blocks",
        "loaded_blocks",
        "load_failed_blocks",
        "loads_cancelled_blocks",
        "stored_blocks",
        "store_failed_blocks",
        "stores_deferred_budget_blocks",
        "stores_deferred_no_cpu_slot_blocks",
        "stores_lost_blocks",
        "gpu_evicted_blocks",
        "cpu_evicted_blocks",
        "cpu_withdrawn_blocks",
    ):
        assert happened[name] >= 50, f"{name}: {happened[name]}"
