"""Replay of a real conversation trace: hits and stores must equal those of a reference simulator, to the block."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from implementations import CORE
from kvtier.reference import ReferenceBlockTable

# Mooncake conversation trace (FAST'25): 512-token blocks, each request a list of chained block ids.
TRACE = Path(__file__).parents[4] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason=f"no trace at {TRACE.name} beside the repository")


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    with gzip.open(TRACE, "rt") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def replay(table, requests: list[list[int]]) -> tuple[int, int, int]:
    """Serves one request after another; hits in the Gpu tier, hits in the Cpu tier, blocks stored."""
    longest = table.gpu_blocks - 1
    for number, block_ids in enumerate(requests):
        digests = b"".join(block_id.to_bytes(32, "little") for block_id in block_ids[:longest])
        # One token more than the full blocks have: else the last block could not hit.
        num_tokens = len(digests) // 32 * table.block_size + 1
        table.admit_hashed(number, digests, num_tokens)
        plan = table.step()
        if plan.load_ticket is not None:
            table.complete(plan.load_ticket)
        table.commit(number, num_tokens)
        plan = table.step()
        if plan.store_ticket is not None:
            table.complete(plan.store_ticket)
        table.release(number)
        table.events()
    table.audit()
    stats = table.stats()
    return stats["gpu_hit_blocks"], stats["cpu_hit_blocks"], stats["stored_blocks"]


TOTALS = {
    1_827: (15_136, 32_573, 240_784),
    9_139: (56_479, 42_868, 188_995),
    18_279: (80_466, 23_120, 184_782),
}


def test_the_trace_is_the_one_that_was_simulated(requests):
    assert len(requests) == 12_031
    assert sum(map(len, requests)) == 288_500
    assert len({block_id for block_ids in requests for block_id in block_ids}) == 182_790


@pytest.mark.parametrize("gpu_blocks", list(TOTALS))
def test_eager_stores(requests, gpu_blocks):
    # The compiled core where there is one: the twin needs some ten seconds, and agrees with it call by call anyway.
    make_table = CORE or ReferenceBlockTable
    table = make_table(gpu_blocks + 1, 4 * gpu_blocks, 512)
    assert replay(table, requests) == TOTALS[gpu_blocks]


@pytest.mark.parametrize("gpu_blocks", list(TOTALS))
def test_gpu_tier_alone(requests, gpu_blocks):
    make_table = CORE or ReferenceBlockTable
    assert replay(make_table(gpu_blocks + 1, 0, 512), requests) == (TOTALS[gpu_blocks][0], 0, 0)


def test_the_twin_replays_the_smallest_tier(requests):
    assert replay(ReferenceBlockTable(1_828, 4 * 1_827, 512), requests) == TOTALS[1_827]
