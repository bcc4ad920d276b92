"""The worker's side of the vLLM connector: real copies, without vLLM, with a clock of the test's."""

import importlib
import os
import time

import numpy as np
import pytest
from kvtier.connectors.vllm.metadata import Load, StepPlan
from kvtier.connectors.vllm.worker import WorkerSide
from kvtier.errors import ConfigError, TransferError

NUM_GPU_BLOCKS = 16
NUM_CPU_BLOCKS = 8
NUM_LAYERS = 3
BLOCK_BYTES = NUM_LAYERS * 64 * 4


def torch_or_skip():
    if os.environ.get("KVTIER_REQUIRE_TORCH"):
        return importlib.import_module("torch")
    return pytest.importorskip("torch", reason="torch is not installed")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Bench:
    """A worker over tensors in which every block differs from every other."""

    def __init__(self):
        torch = torch_or_skip()
        self.clock = Clock()
        self.step = 0
        values = torch.arange(NUM_LAYERS * NUM_GPU_BLOCKS * 64, dtype=torch.float32)
        self.layers = list(values.reshape(NUM_LAYERS, NUM_GPU_BLOCKS, 64).unbind())
        self.worker = WorkerSide(self.layers, NUM_CPU_BLOCKS, BLOCK_BYTES, 1, 3, self.clock)

    def plan(self, loads=(), stores=None, ticket=None, known_step=0):
        self.step += 1
        rows = None if stores is None else np.asarray(stores, np.int32)
        return StepPlan(self.step, known_step, list(loads), ticket, rows)

    def run(self, plan):
        """One step: what has been received and what is bad after it."""
        self.worker.begin_loads(plan)
        self.worker.begin_stores(plan)
        return self.worker.collect(False), self.worker.take_bad_blocks()

    def end(self):
        """All that comes until no copy is open: received requests, bad blocks, finished tickets."""
        received, bad, finished = set(), set(), []
        deadline = time.monotonic() + 30
        while True:
            received |= self.worker.collect(True)
            bad |= self.worker.take_bad_blocks()
            finished += self.worker.take_acknowledgements().finished
            if not self.worker._open:
                return received, bad, finished
            assert time.monotonic() < deadline, "a copy does not end"

    def block(self, gpu_id):
        return [layer[gpu_id].tolist() for layer in self.layers]

    def spoil(self, gpu_id):
        for layer in self.layers:
            layer[gpu_id] = -1


@pytest.fixture
def bench():
    made = Bench()
    engine = made.worker.engine
    yield made
    engine.close(0.0)


def load(name, ticket, pairs, *, is_same_step=False):
    return Load(name, ticket, np.asarray(pairs, np.int32), is_same_step)


def stored(bench, pairs, ticket=1):
    bench.run(bench.plan(stores=pairs, ticket=ticket))
    assert bench.end() == (set(), set(), [(ticket, 3, [])])


def test_what_was_stored_comes_back(bench):
    before = [bench.block(2), bench.block(9)]
    stored(bench, [(2, 5), (9, 0)])
    bench.spoil(2)
    bench.run(bench.plan([load("a", 2, [(5, 12), (0, 2)])]))
    assert bench.end()[1:] == (set(), [(2, 3, [])])
    assert [bench.block(12), bench.block(2)] == before


def test_a_load_is_reported_when_it_has_ended(bench):
    stored(bench, [(1, 1)])
    # Nothing is copied until the test says so.
    submit, kept = bench.worker.engine.submit_pairs, []
    bench.worker.engine.submit_pairs = lambda *args: kept.append(args)
    assert bench.run(bench.plan([load("a", 2, [(1, 4)])])) == (set(), set())
    assert bench.worker.take_acknowledgements().queue_depth == 1
    submit(*kept[0])
    assert bench.end() == ({"a"}, set(), [(2, 3, [])])
    assert bench.block(4) == bench.block(1)


def test_a_step_waits_for_the_loads_that_it_needs(bench):
    stored(bench, [(1, 1), (2, 2)])
    plan = bench.plan([load("a", 2, [(1, 4)], is_same_step=True), load("b", 3, [(2, 5)])])
    bench.worker.begin_loads(plan)
    assert bench.block(4) == bench.block(1)
    received, bad, finished = bench.end()
    # The request of the step does not wait for a report, and gets none.
    assert (received, bad, sorted(finished)) == ({"b"}, set(), [(2, 3, []), (3, 3, [])])


def test_failed_pairs_are_bad_blocks(bench):
    stored(bench, [(gpu_id, gpu_id) for gpu_id in range(4)])
    bench.worker.engine.inject_failures("load", [1, 3], 1)
    bench.run(bench.plan())
    bench.worker.begin_loads(bench.plan([load("a", 2, [(at, 8 + at) for at in range(4)])]))
    assert bench.end() == ({"a"}, {9, 11}, [(2, 3, [1, 3])])
    assert bench.block(8) == bench.block(0)


@pytest.mark.parametrize("is_same_step", [True, False])
def test_a_load_whose_blocks_were_lost_is_bad_as_a_whole(bench, is_same_step):
    received, bad = bench.run(bench.plan([load("a", None, [(0, 6), (0, 7)], is_same_step=is_same_step)]))
    assert bad == {6, 7}
    assert received == (set() if is_same_step else {"a"})
    assert bench.worker.take_acknowledgements().finished == []


def test_what_was_computed_on_a_failed_load_is_not_stored(bench):
    stored(bench, [(1, 1)])
    bench.worker.engine.inject_failures("load", None, 1)
    spoilt = bench.plan([load("a", 2, [(1, 4)], is_same_step=True)], stores=[(5, 2), (6, 3)], ticket=3)
    bench.run(spoilt)
    # Planned before the scheduler knew.
    bench.run(bench.plan(stores=[(7, 4)], ticket=4, known_step=spoilt.step - 1))
    # Planned when it knew.
    bench.run(bench.plan(stores=[(8, 5)], ticket=5, known_step=spoilt.step))
    _, _, finished = bench.end()
    assert sorted(finished) == [(2, 3, [0]), (3, 3, [0, 1]), (4, 3, [0]), (5, 3, [])]


def test_an_asynchronous_failure_spoils_no_stores(bench):
    stored(bench, [(1, 1)])
    bench.worker.engine.inject_failures("load", None, 1)
    bench.run(bench.plan([load("a", 2, [(1, 4)])], stores=[(5, 2)], ticket=3))
    assert sorted(bench.end()[2]) == [(2, 3, [0]), (3, 3, [])]


def test_copies_are_measured_once(bench):
    bench.run(bench.plan(stores=[(1, 1), (2, 2)], ticket=1))
    copied = []
    while bench.worker._open:
        bench.worker.collect(True)
        copied.append(bench.worker.take_acknowledgements().copied)
    copied.append(bench.worker.take_acknowledgements().copied)
    assert sum(each.store_bytes for each in copied) == 2 * BLOCK_BYTES
    assert sum(each.store_seconds for each in copied) > 0
    assert not any(each.load_bytes for each in copied)


def test_after_the_end_everything_fails_at_once(bench):
    stored(bench, [(1, 1)])
    bench.worker.engine.close(0.0)
    received, bad = bench.run(bench.plan([load("a", 2, [(1, 4)])], stores=[(5, 2)], ticket=3))
    assert (received, bad) == ({"a"}, {4})
    told = bench.worker.take_acknowledgements()
    assert (told.finished, told.dead_ranks, told.queue_depth) == ([(2, 3, [0]), (3, 3, [0])], [3], 0)
    assert bench.worker.death is not None
    # A step that would wait for a load does not.
    _, bad = bench.run(bench.plan([load("b", 4, [(1, 6)], is_same_step=True)]))
    assert bad == {6}
    assert bench.worker.take_acknowledgements().dead_ranks == []


def lose(bench):
    """From now on the engine is never told of a copy."""
    submit = bench.worker.engine.submit_pairs
    bench.worker.engine.submit_pairs = lambda *args: None
    return submit


def test_a_lost_copy_ends_the_tier(bench):
    lose(bench)
    bench.run(bench.plan([load("a", 1, [(1, 4)])]))
    bench.clock.now += 29
    assert bench.worker.collect(False) == set()
    assert bench.worker.death is None
    bench.clock.now += 2
    assert bench.worker.collect(False) == {"a"}
    assert "within 30 s" in bench.worker.death
    assert bench.worker.take_bad_blocks() == {4}


def test_a_queue_that_moves_is_alive_for_longer(bench):
    submit = lose(bench)
    bench.run(bench.plan(stores=[(1, 1)], ticket=1))
    bench.worker.engine.submit_pairs = submit
    for ticket in range(2, 13):
        bench.clock.now += 25
        bench.run(bench.plan(stores=[(2, 2)], ticket=ticket))
        while ticket in bench.worker._open:
            bench.worker.collect(True)
        assert bench.worker.death is None
    bench.clock.now += 29
    bench.worker.collect(False)
    assert "though others were" in bench.worker.death
    assert bench.worker.take_acknowledgements().finished[-1] == (1, 3, [0])


def test_a_thread_that_does_not_end(bench):
    """It matters only if it may still write to blocks that vLLM computes instead."""

    class Hanging:
        def __init__(self, engine):
            self.engine = engine

        def __getattr__(self, name):
            return getattr(self.engine, name)

        def submit_pairs(self, *args):
            pass

        def close(self, timeout_s):
            raise TransferError("copy threads did not end within 2 s")

    bench.worker.engine = Hanging(bench.worker.engine)
    bench.run(bench.plan(stores=[(1, 1)], ticket=1))
    bench.clock.now += 31
    bench.worker.collect(False)
    assert bench.worker.death is not None
    assert bench.worker.take_acknowledgements().finished == [(1, 3, [0])]

    bench.worker.death = None
    bench.run(bench.plan([load("a", 2, [(1, 4)])]))
    bench.clock.now += 31
    with pytest.raises(TransferError, match="may still write to KV blocks"):
        bench.worker.collect(False)


def test_tensors_that_cannot_be_copied_are_refused_by_name():
    torch = torch_or_skip()
    elsewhere = torch.empty((4, 64), device="meta")
    with pytest.raises(ConfigError, match=r"kv_caches\[1\].device"):
        WorkerSide([torch.empty((4, 64)), elsewhere], 4, 512, 1, 0)
    with pytest.raises(ConfigError, match="bytes per block"):
        WorkerSide([torch.empty((4, 64))], 4, 64, 1, 0)
    # Layers that share memory are copied once.
    tensor = torch.empty((4, 64))
    worker = WorkerSide([tensor, tensor], 4, 256, 1, 0)
    assert worker.engine.gpu.block_bytes == 256
    worker.close()
