"""The connector in the real engine. Every comparison is of tokens and of KV bytes by block hash."""

import random

import pytest
from kv_bytes import compare_kv, scheduler_of, sides_of
from runs import documents, generate, one_by_one, settle


def test_evicted_prefixes_return(make_engine):
    docs = documents(6, 290)
    plain = make_engine()
    expected = one_by_one(plain, docs)
    engine = make_engine({"host_gib": 0.05, "load_choice": "always"})
    known = {}
    assert one_by_one(engine, docs, known) == expected
    settle(engine)
    table = sides_of(engine)[0].table
    before = table.stats()
    assert before["stored_blocks"] >= 6 * 9
    assert one_by_one(engine, docs, known) == expected
    settle(engine)
    loaded = table.stats()["loaded_blocks"] - before["loaded_blocks"]
    # The pool holds fewer than three of the documents, and each pushes out what comes next.
    assert loaded >= 0.95 * 6 * 9
    assert table.stats()["load_failed_blocks"] == 0
    table.audit()


def test_mixed_requests_with_sharing_preemption_and_chunks(make_engine):
    rng = random.Random(3)
    stems = documents(8, 256, seed=4)
    prompts = []
    for _ in range(60):
        stem = rng.choice(stems)
        prompts.append(stem[: 32 * rng.randrange(2, 9)] + documents(1, rng.randrange(1, 60), rng.random())[0])
    options = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True, "max_num_seqs": 6}
    expected = generate(make_engine(**options), prompts, 24)
    engine = make_engine({"host_gib": 0.05}, **options)
    known = {}
    for start in range(0, len(prompts), 15):
        assert generate(engine, prompts[start : start + 15], 24) == expected[start : start + 15]
        settle(engine)
        compare_kv(engine, known)
    table = sides_of(engine)[0].table
    assert table.stats()["loaded_blocks"] > 0
    table.audit()
    assert scheduler_of(engine).reset_prefix_cache(reset_connector=True)
    assert table.stats()["cpu_cached_blocks"] == 0


def test_failed_loads_are_computed(make_engine):
    docs = documents(6, 290, seed=7)
    expected = one_by_one(make_engine(), docs)
    engine = make_engine({"host_gib": 0.05, "load_choice": "always"})
    known = {}
    assert one_by_one(engine, docs, known) == expected
    settle(engine)
    tables, worker = sides_of(engine)
    for doc, tokens in zip(docs, expected, strict=True):
        worker.engine.inject_failures("load", [3, 4], 1)
        assert one_by_one(engine, [doc], known) == [tokens]
        settle(engine)
    stats = tables.table.stats()
    assert stats["load_failed_blocks"] >= 10
    assert stats["withdrawn_blocks"] == stats["load_failed_blocks"]
    # What was withdrawn has been computed and stored again.
    assert one_by_one(engine, docs, known) == expected
    tables.table.audit()


def test_failed_stores_are_forgotten(make_engine):
    docs = documents(4, 290, seed=8)
    expected = one_by_one(make_engine(), docs)
    engine = make_engine({"host_gib": 0.05})
    tables, worker = sides_of(engine)
    worker.engine.inject_failures("store", None, 1000)
    known = {}
    assert one_by_one(engine, docs * 2, known) == expected * 2
    settle(engine)
    assert tables.table.stats()["stored_blocks"] == 0
    assert tables.table.stats()["loaded_blocks"] == 0
    tables.table.audit()


def test_swapped_blocks_are_noticed(make_engine):
    docs = documents(5, 290, seed=10)
    engine = make_engine({"host_gib": 0.05})
    known = {}
    one_by_one(engine, docs, known)
    settle(engine)
    memory = sides_of(engine)[1].engine.cpu.array()
    used = [row for row in range(len(memory)) if memory[row].any()]
    memory[used] = memory[used[1:] + used[:1]]
    with pytest.raises(AssertionError, match="other bytes"):
        one_by_one(engine, docs, known)


def test_bfloat16(make_engine):
    docs = documents(5, 290, seed=11)
    expected = one_by_one(make_engine(dtype="bfloat16"), docs)
    engine = make_engine({"host_gib": 0.05, "load_choice": "always"}, dtype="bfloat16")
    known = {}
    assert one_by_one(engine, docs * 2, known) == expected * 2
    settle(engine)
    assert sides_of(engine)[0].table.stats()["loaded_blocks"] >= 30
