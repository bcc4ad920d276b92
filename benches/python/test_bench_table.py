"""The table's calls from Python, by pytest-benchmark. Not collected by a plain `pytest`; `make bench` runs it."""

from __future__ import annotations

import array

import pytest
from kvtier import BlockTable
from workload import BLOCK_SIZE, Hits, Misses, Spill

pytest.importorskip("pytest_benchmark", reason="make bench installs pytest-benchmark")


@pytest.mark.parametrize("gpu_blocks", [20_000, 1_000_000])
def test_hit_256(benchmark, gpu_blocks):
    benchmark(Hits(gpu_blocks, 256))


def test_hit_3(benchmark):
    benchmark(Hits(20_000, 3))


@pytest.mark.parametrize("num_blocks", [3, 256])
def test_miss(benchmark, num_blocks):
    misses = Misses(20_000, 40_000, num_blocks)
    benchmark.pedantic(misses, setup=misses.prepare, rounds=300)


def test_store_side_1280(benchmark):
    spill = Spill()
    benchmark.pedantic(spill.store, setup=spill.prepare_store, teardown=spill.finish_store, rounds=100)


def test_hit_side_1280(benchmark):
    spill = Spill()
    benchmark.pedantic(spill.hit, setup=spill.prepare_hit, teardown=spill.finish_hit, rounds=100)


def test_hash_256(benchmark):
    tokens = array.array("I", range(256 * BLOCK_SIZE))
    assert len(benchmark(BlockTable(1, 0, BLOCK_SIZE).block_hashes, tokens)) == 256 * 32
