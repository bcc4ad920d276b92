"""What the vLLM connector makes of measured costs; without vLLM, with a clock of the test's."""

import pytest
from kvtier.connectors.vllm.costs import Costs, Rate
from kvtier.connectors.vllm.metadata import Acknowledgements, Copied


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def costs(clock):
    return Costs(block_bytes=1000, block_size=10, copy_threads=2, clock=clock)


def step(costs, clock, number, tokens, requests, seconds, *, is_pure=True):
    costs.begin_step(number, tokens, requests, is_pure)
    clock.now += seconds
    costs.end_step(number)


def test_a_rate_forgets_what_is_old():
    rate = Rate()
    assert rate.per_second is None
    rate.add(0, 1)
    rate.add(1, 0)
    assert rate.per_second is None
    for _ in range(50):
        rate.add(10, 1)
    assert rate.per_second == pytest.approx(10)
    for _ in range(50):
        rate.add(30, 1)
    assert rate.per_second == pytest.approx(30, rel=1e-3)


def test_nothing_follows_before_it_is_measured(costs):
    assert costs.load_seconds(5) is None
    assert costs.compute_seconds(5) is None
    assert not costs.is_cheaper_to_compute(1, 0)
    assert not costs.fits_same_step(1, 0, 0)


def test_loads_are_estimated_by_stores_first_and_shared_over_threads(costs):
    costs.observe(Copied(store_bytes=4000, store_seconds=2.0))
    assert costs.load_seconds(8) == pytest.approx(8 * 1000 / (2000 * 2))
    costs.observe(Copied(load_bytes=1000, load_seconds=1.0))
    assert costs.load_seconds(8) == pytest.approx(8 * 1000 / (1000 * 2))


def test_prefill_is_measured_by_steps_that_prefill(costs, clock):
    step(costs, clock, 1, 8, 8, 1.0)  # eight requests that decode
    assert costs.compute_seconds(1) is None
    step(costs, clock, 2, 100, 1, 2.0, is_pure=False)  # it waited for a load
    assert costs.compute_seconds(1) is None
    step(costs, clock, 3, 100, 1, 2.0)
    assert costs.compute_seconds(10) == pytest.approx(2.0)


def test_steps_that_overlap_are_charged_once(costs, clock):
    costs.begin_step(1, 100, 1, is_pure=True)
    clock.now = 1.0
    costs.begin_step(2, 100, 1, is_pure=True)
    clock.now = 2.0
    costs.end_step(1)
    clock.now = 4.0
    costs.end_step(2)  # two seconds after the first, though it was begun three before
    assert costs.prefill.per_second == pytest.approx((0.8 * 100 + 100) / (0.8 * 2 + 2))


def test_the_cheaper_way_is_taken_and_measured_again_now_and_then(costs, clock):
    step(costs, clock, 1, 1000, 1, 1.0)  # 10 blocks in 0.1 s
    costs.observe(Copied(load_bytes=1000, load_seconds=1.0))  # 10 blocks in 5 s
    answers = [costs.is_cheaper_to_compute(10, 0) for _ in range(32)]
    assert answers.count(False) == 2
    costs = Costs(1000, 10, 2, clock)
    step(costs, clock, 2, 1000, 1, 1.0)
    costs.observe(Copied(load_bytes=10**6, load_seconds=1.0))  # 10 blocks in 5 ms
    assert not costs.is_cheaper_to_compute(10, 0)
    # Behind a queue of loads it takes longer.
    assert costs.is_cheaper_to_compute(10, 10_000)


def test_a_step_waits_for_a_load_that_delays_less_than_another_step(costs, clock):
    costs.observe(Copied(load_bytes=10**6, load_seconds=1.0))  # a block in half a millisecond
    assert costs.fits_same_step(10, 0, 0)
    assert not costs.fits_same_step(1000, 0, 0)  # half a second is too long for anybody
    assert not costs.fits_same_step(10, 0, 1)  # how long a step takes is not known yet
    step(costs, clock, 1, 8, 8, 0.020)
    assert costs.fits_same_step(10, 0, 3)  # 5 ms for each of four
    assert not costs.fits_same_step(10, 0, 4)


def test_acknowledgements_of_ranks_add_up():
    one = Acknowledgements(3, [(1, 0, [])], [], Copied(load_bytes=5, load_seconds=1.0), 2)
    two = Acknowledgements(3, [(1, 1, [4])], [1], Copied(load_bytes=7, load_seconds=2.0), 1)
    both = one.aggregate(two)
    assert both.finished == [(1, 0, []), (1, 1, [4])]
    assert (both.step, both.dead_ranks, both.queue_depth) == (3, [1], 3)
    assert (both.copied.load_bytes, both.copied.load_seconds) == (12, 3.0)
