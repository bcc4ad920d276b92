"""Store modes, budgets, and which hits are loaded how."""

import pytest
from kv_bytes import compare_kv, scheduler_of, sides_of
from runs import documents, generate, one_by_one, settle

BLOCKS = 9  # full blocks of a document that can be a hit


@pytest.fixture(scope="module")
def docs():
    return documents(6, 290, seed=20)


@pytest.fixture(scope="module")
def expected(make_shared_engine, docs):
    return one_by_one(make_shared_engine(), docs)


def loaded_in_a_round(engine, docs, expected, known):
    table = sides_of(engine)[0].table
    before = table.stats()["loaded_blocks"]
    assert one_by_one(engine, docs, known) == expected
    settle(engine)
    table.audit()
    return table.stats()["loaded_blocks"] - before


def test_lazy_stores_what_is_about_to_be_reused(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05, "store_mode": "lazy"})
    known = {}
    assert one_by_one(engine, docs[:1], known) == expected[:1]
    settle(engine)
    # The pool is not full: nothing is about to be reused.
    assert sides_of(engine)[0].table.stats()["stored_blocks"] == 0
    assert one_by_one(engine, docs[1:], known) == expected[1:]
    settle(engine)
    assert loaded_in_a_round(engine, docs, expected, known) >= 0.95 * len(docs) * BLOCKS


def test_second_use_stores_at_the_second_use(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05, "store_mode": "second_use"})
    known = {}
    assert loaded_in_a_round(engine, docs, expected, known) == 0
    stats = sides_of(engine)[0].table.stats()
    assert stats["stored_blocks"] == 0
    assert stats["first_use_blocks"] >= len(docs) * BLOCKS
    assert loaded_in_a_round(engine, docs, expected, known) == 0
    assert sides_of(engine)[0].table.stats()["stored_blocks"] >= len(docs) * BLOCKS
    assert loaded_in_a_round(engine, docs, expected, known) >= 0.95 * len(docs) * BLOCKS


@pytest.mark.parametrize("same_step", [True, False])
def test_loads_within_the_step_and_beside_it(make_engine, docs, expected, same_step):
    engine = make_engine({"host_gib": 0.05, "same_step_loads": same_step})
    known = {}
    loaded_in_a_round(engine, docs, expected, known)
    assert loaded_in_a_round(engine, docs, expected, known) >= 0.95 * len(docs) * BLOCKS
    num_same_step = sides_of(engine)[0].stats()["num_same_step_loads"]
    # One request at a time: nobody is delayed, so every load whose duration is known is waited for.
    assert num_same_step >= len(docs) if same_step else num_same_step == 0


def test_a_budget_of_stores_delays_them(make_engine, docs, expected):
    engine = make_engine()
    block_bytes = scheduler_of(engine).kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes * 3
    engine = make_engine({"host_gib": 0.05, "max_store_bytes_per_step": 2 * block_bytes})
    known = {}
    loaded_in_a_round(engine, docs, expected, known)
    stats = sides_of(engine)[0].table.stats()
    assert stats["over_budget_blocks"] > 0
    # A prefill and three decoding steps of two blocks each.
    assert 0 < stats["stored_blocks"] <= len(docs) * 4 * 2
    assert one_by_one(engine, docs, known) == expected


def test_a_budget_of_loads_delays_requests(make_engine, docs, expected):
    engine = make_engine()
    block_bytes = scheduler_of(engine).kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes * 3
    engine = make_engine({"host_gib": 0.05, "max_load_bytes_per_step": 2 * block_bytes, "load_choice": "always"})
    known = {}
    loaded_in_a_round(engine, docs, expected, known)
    # Both fit the pool, and each alone is above the budget: the second waits for the next step.
    assert generate(engine, docs[:2]) == expected[:2]
    settle(engine)
    compare_kv(engine, known)
    tables = sides_of(engine)[0]
    assert tables.stats()["num_deferred"] >= 1
    assert tables.table.stats()["loaded_blocks"] == 2 * BLOCKS


def test_a_prefix_that_is_being_loaded_is_joined(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05, "same_step_loads": False, "load_choice": "always"})
    known = {}
    loaded_in_a_round(engine, docs, expected, known)
    # The same document twice, and one that has nothing to do with it.
    assert generate(engine, [docs[0], docs[0], documents(1, 40, seed=77)[0]])[:2] == [expected[0]] * 2
    settle(engine)
    compare_kv(engine, known)
    tables = sides_of(engine)[0]
    assert tables.stats()["num_joined"] == 1
    assert tables.table.stats()["loaded_blocks"] == BLOCKS


def test_short_hits_are_computed(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05, "min_hit_tokens": 289})
    known = {}
    loaded_in_a_round(engine, docs, expected, known)
    assert loaded_in_a_round(engine, docs, expected, known) == 0
    assert sides_of(engine)[0].stats()["skipped_short_tokens"] >= len(docs) * BLOCKS * 32


def test_what_is_computed_sooner_is_computed(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05})
    known = {}
    loaded_in_a_round(engine, docs, expected, known)
    costs = sides_of(engine)[0].costs
    assert costs.load_seconds(BLOCKS) < costs.compute_seconds(BLOCKS)
    # As if the copies had become a thousand times slower than computing.
    slow = costs.prefill.per_second / 32 * costs.block_bytes / 1000
    for rate in (costs.loads, costs.stores):
        rate.amount, rate.seconds = 1e6 * slow, 1e6
    assert loaded_in_a_round(engine, docs, expected, known) == 0
    assert sides_of(engine)[0].stats()["skipped_compute_tokens"] >= len(docs) * BLOCKS * 32


def test_blocks_that_the_host_dropped_are_offered_again(make_engine, docs, expected):
    engine = make_engine()
    block_bytes = scheduler_of(engine).kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes * 3
    slot_bytes = -(-block_bytes // 4096) * 4096
    # Room for three of the documents: each round pushes every one out.
    engine = make_engine({"host_gib": 3.5 * BLOCKS * slot_bytes / 2**30})
    known = {}
    for _ in range(3):
        assert one_by_one(engine, docs, known) == expected
        settle(engine)
    table = sides_of(engine)[0].table
    assert table.stats()["evicted_blocks"] >= 2 * len(docs) * BLOCKS
    assert table.stats()["stored_blocks"] >= 3 * len(docs) * BLOCKS - 3 * BLOCKS
    # The last two are still there, and the pool has room for two others.
    assert one_by_one(engine, documents(3, 290, seed=21))
    settle(engine)
    table.audit()
