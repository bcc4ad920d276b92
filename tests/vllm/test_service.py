"""What a service sees of the connector: events, statistics, resets, salts, the second tier's end."""

import logging

import pytest
from kv_bytes import compare_kv, scheduler_of, sides_of
from runs import documents, generate, one_by_one, settle

BLOCKS = 9


@pytest.fixture(scope="module")
def docs():
    return documents(5, 290, seed=30)


@pytest.fixture(scope="module")
def expected(make_shared_engine, docs):
    return one_by_one(make_shared_engine(), docs)


def test_events_say_what_the_host_tier_has(make_engine, docs, expected):
    from vllm.config import KVEventsConfig

    engine = make_engine(
        {"host_gib": 0.05}, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    )
    scheduler = scheduler_of(engine)
    batches = []
    scheduler.kv_event_publisher.publish = batches.append
    assert one_by_one(engine, docs, {}) == expected
    settle(engine)
    events = [event for batch in batches for event in batch.events if getattr(event, "medium", None) == "CPU"]
    stored = {}
    for event in events:
        assert type(event).__name__ == "BlockStored"
        assert event.block_size == 32
        stored[event.block_hashes[0]] = event
    table = sides_of(engine)[0].table
    assert len(stored) == len(events) == table.stats()["stored_blocks"] >= len(docs) * BLOCKS
    # A router that follows the parents gets the documents back.
    heads = [event for event in stored.values() if event.parent_block_hash is None]
    assert len(heads) == len(docs)
    by_parent = {event.parent_block_hash: event for event in stored.values() if event.parent_block_hash is not None}
    for head in heads:
        tokens, event = list(head.token_ids), head
        while event.block_hashes[0] in by_parent:
            event = by_parent[event.block_hashes[0]]
            tokens += event.token_ids
        assert any(tokens[: BLOCKS * 32] == doc[: BLOCKS * 32] for doc in docs)
    batches.clear()
    assert scheduler.reset_prefix_cache(reset_connector=True)
    assert one_by_one(engine, documents(1, 40, seed=31))
    removed = [
        block_hash
        for batch in batches
        for event in batch.events
        if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"
        for block_hash in event.block_hashes
    ]
    assert set(removed) == set(stored)


def test_nothing_is_announced_before_it_is_there(make_engine, docs):
    from vllm.config import KVEventsConfig

    engine = make_engine(
        {"host_gib": 0.05}, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    )
    batches = []
    scheduler_of(engine).kv_event_publisher.publish = batches.append
    sides_of(engine)[1].engine.inject_failures("store", None, 1000)
    one_by_one(engine, docs[:2])
    settle(engine)
    assert not [event for batch in batches for event in batch.events if getattr(event, "medium", None) == "CPU"]


def test_every_statistic_is_declared_and_adds_up(make_engine, docs, expected):
    from kvtier.connectors.vllm.stats import COUNTERS, GAUGES

    engine = make_engine({"host_gib": 0.05, "load_choice": "always"}, disable_log_stats=False)
    assert one_by_one(engine, docs * 2, {}) == expected * 2
    settle(engine)
    generate(engine, documents(1, 40, seed=32))
    named = {
        metric.name.removeprefix("vllm:kvtier_"): metric.value
        for metric in engine.get_metrics()
        if "kvtier" in metric.name
    }
    assert set(named) == set(COUNTERS) | set(GAUGES)
    stats = sides_of(engine)[0].stats()
    assert named["loaded_blocks"] == stats["loaded_blocks"] >= 0.95 * len(docs) * BLOCKS
    assert named["host_hit_tokens"] == 32 * stats["loaded_blocks"]
    assert named["prompt_tokens"] == 2 * 290 * len(docs) + 40
    block_bytes = sides_of(engine)[0].costs.block_bytes
    assert named["load_bytes"] == block_bytes * stats["loaded_blocks"]
    assert named["store_bytes"] == block_bytes * stats["stored_blocks"]
    # A snapshot has whole numbers.
    assert stats["load_seconds"] > 0
    assert named["load_seconds"] == int(stats["load_seconds"])
    assert named["is_without_tier"] == named["queue_depth"] == 0


def test_metrics_may_be_left_out(make_engine, docs):
    engine = make_engine({"host_gib": 0.05, "metrics": False}, disable_log_stats=False)
    one_by_one(engine, docs[:1])
    assert not [metric for metric in engine.get_metrics() if "kvtier" in metric.name and metric.value]


def test_sleep_and_reset_empty_the_host_tier(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05, "load_choice": "always"})
    assert one_by_one(engine, docs, {}) == expected
    settle(engine)
    tables = sides_of(engine)[0]
    assert tables.table.stats()["cpu_cached_blocks"] >= len(docs) * BLOCKS
    # vLLM's CPU worker keeps its memory; the scheduler does all that it does before new weights come.
    engine.sleep(level=1)
    assert tables.table.stats()["cpu_cached_blocks"] == 0
    engine.wake_up()
    before = tables.table.stats()["loaded_blocks"]
    known = {}
    assert one_by_one(engine, docs, known) == expected
    settle(engine)
    assert tables.table.stats()["loaded_blocks"] == before
    assert one_by_one(engine, docs, known) == expected
    assert tables.table.stats()["loaded_blocks"] > before


def test_a_reset_forgets_what_is_being_stored(make_engine, docs):
    engine = make_engine({"host_gib": 0.05})
    tables, worker = sides_of(engine)
    submit = worker.engine.submit_pairs
    kept = []
    # The copies do not begin before the reset.
    worker.engine.submit_pairs = lambda *args, **kwargs: kept.append((args, kwargs))
    generate(engine, docs[:1])
    assert kept
    assert scheduler_of(engine).connector.reset_cache()
    worker.engine.submit_pairs = submit
    for args, kwargs in kept:
        submit(*args, **kwargs)
    settle(engine)
    stats = tables.table.stats()
    assert stats["cpu_cached_blocks"] == stats["stored_blocks"] == 0
    assert stats["store_failed_blocks"] > 0
    tables.table.audit()


def test_a_salt_keeps_tenants_apart(make_engine, docs):
    from vllm import SamplingParams

    engine = make_engine({"host_gib": 0.05, "load_choice": "always"})
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    tables = sides_of(engine)[0]

    def ask(salt):
        for doc in docs[:3]:
            engine.generate([{"prompt_token_ids": doc, "cache_salt": salt}], params, use_tqdm=False)
        settle(engine)
        return tables.table.stats()["loaded_blocks"]

    assert ask("one") == 0
    assert ask("two") == 0
    assert ask("one") >= 0.95 * 3 * BLOCKS


def test_the_end_of_the_copy_engine_is_told_once(make_engine, docs, expected):
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.kvtier"), Lines(logging.ERROR)
    logger.addHandler(handler)
    engine = make_engine({"host_gib": 0.05})
    known = {}
    assert one_by_one(engine, docs[:3], known) == expected[:3]
    tables, worker = sides_of(engine)
    worker.engine.close()
    assert one_by_one(engine, docs * 2, known) == expected * 2
    settle(engine)
    assert tables.is_dead
    assert tables.stats()["is_without_tier"] == 1
    logger.removeHandler(handler)
    assert len(lines) == 1
    assert "no second tier from now on" in lines[0]
    compare_kv(engine, known)
    tables.table.audit()


def test_a_copy_that_never_ends_is_given_up(make_engine, docs, expected):
    engine = make_engine({"host_gib": 0.05})
    tables, worker = sides_of(engine)
    assert one_by_one(engine, docs[:3], {}) == expected[:3]
    settle(engine)
    submit = worker.engine.submit_pairs
    # Lost on the way: the engine is never told of these copies.
    worker.engine.submit_pairs = lambda *args, **kwargs: None
    now = worker._clock()
    worker._clock = lambda: now
    generate(engine, documents(1, 290, seed=33))
    assert worker._open
    now += 31
    assert one_by_one(engine, docs * 2, {}) == expected * 2
    worker.engine.submit_pairs = submit
    settle(engine)
    assert "not copied within 30 s" in worker.death
    assert tables.is_dead
    tables.table.audit()
