"""Two hundred mixed requests: shared prefixes, preemption, chunked prefill, aborts, failing copies."""

import random

import pytest
from kv_bytes import compare_kv, scheduler_of, sides_of
from runs import documents, settle, step_through

NUM_REQUESTS = 200
BATCH = 20
MAX_TOKENS = 24
# A pool of fewer blocks than six of the longest requests need, and steps shorter than a prompt.
ENGINE = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    stems = documents(16, 256, seed=4)
    made = []
    for _ in range(NUM_REQUESTS):
        stem = stems[min(rng.randrange(16), rng.randrange(16))][: 32 * rng.randrange(2, 9)]
        made.append(stem + documents(1, rng.randrange(1, 60), rng.random())[0])
    return made


@pytest.fixture(scope="module")
def expected(make_shared_engine, prompts):
    """The tokens of every request, without a connector."""
    engine = make_shared_engine(**ENGINE)
    return [tokens for at in range(0, NUM_REQUESTS, BATCH) for tokens in run(engine, prompts, at)]


def run(engine, prompts, at, aborts=None):
    return step_through(engine, prompts[at : at + BATCH], MAX_TOKENS, aborts)


def check_all(engine, prompts, expected, aborts_of=None):
    known = {}
    num_cut_short = 0
    for at in range(0, NUM_REQUESTS, BATCH):
        aborts = aborts_of(at) if aborts_of is not None else {}
        for index, tokens in enumerate(run(engine, prompts, at, aborts)):
            # An aborted request has told a beginning.
            wanted = expected[at + index]
            assert tokens == (wanted[: len(tokens)] if index in aborts else wanted), f"request {at + index}"
            num_cut_short += len(tokens) < len(wanted)
        settle(engine)
        compare_kv(engine, known)
        sides_of(engine)[0].table.audit()
    pool = scheduler_of(engine).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block is still held"
    assert (num_cut_short > NUM_REQUESTS // 5) == (aborts_of is not None)
    stats = sides_of(engine)[0].stats()
    assert stats["num_tickets"] == 0
    return stats


def count_preemptions(engine):
    scheduler = scheduler_of(engine)
    preempt, count = scheduler._preempt_request, [0]

    def counted(*args, **kwargs):
        count[0] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    return count


@pytest.mark.parametrize("mode", ["eager", "lazy", "second_use"])
def test_the_output_is_that_without_a_connector(make_engine, prompts, expected, mode):
    engine = make_engine({"host_gib": 0.05, "store_mode": mode}, **ENGINE)
    num_preemptions = count_preemptions(engine)
    stats = check_all(engine, prompts, expected)
    assert num_preemptions[0] > 0
    assert stats["loaded_blocks"] > 50
    assert stats["load_failed_blocks"] == 0


def test_a_host_tier_smaller_than_the_pool(make_engine, prompts, expected):
    stats = check_all(make_engine({"host_gib": 0.002}, **ENGINE), prompts, expected)
    assert stats["evicted_blocks"] > 0


@pytest.mark.parametrize("same_step", [True, False])
def test_every_fifth_load_fails(make_engine, prompts, expected, same_step):
    options = {"host_gib": 0.05, "load_choice": "always", "same_step_loads": same_step}
    engine = make_engine(options, **ENGINE)
    rng = random.Random(5)
    worker = sides_of(engine)[1]
    submit = worker.engine.submit_pairs

    def failing(ticket, direction, pairs, **kwargs):
        failed = [index for index in range(len(pairs)) if rng.random() < 0.2]
        if direction == "load" and failed:
            worker.engine.inject_failures("load", failed, 1)
        return submit(ticket, direction, pairs, **kwargs)

    worker.engine.submit_pairs = failing
    stats = check_all(engine, prompts, expected)
    assert stats["load_failed_blocks"] > 20
    # One whose block another load has lost in between is withdrawn once.
    assert 0 < stats["withdrawn_blocks"] <= stats["load_failed_blocks"]


def test_aborts_at_any_point(make_engine, prompts, expected):
    engine = make_engine({"host_gib": 0.05, "same_step_loads": False}, **ENGINE)
    rng = random.Random(6)

    def aborts_of(at):
        return {index: rng.randrange(60) for index in rng.sample(range(BATCH), 8)}

    stats = check_all(engine, prompts, expected, aborts_of)
    assert stats["loaded_blocks"] > 50
    assert not sides_of(engine)[0]._live
