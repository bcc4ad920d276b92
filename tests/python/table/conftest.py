"""Fixtures: which block table, and how copies behave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from implementations import IMPLEMENTATIONS  # comes first: it makes kvtier importable without its core
from table_harness import Harness, span


@pytest.fixture(params=list(IMPLEMENTATIONS))
def make_table(request: pytest.FixtureRequest) -> Any:
    """The class of the block table under test."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=["early", "late"])
def make(request: pytest.FixtureRequest, make_table: Any) -> Callable[..., Harness]:
    """Makes a table `make(gpu_blocks, cpu_blocks, block_size=4)`; every call on it is checked."""

    def table(gpu_blocks: int, cpu_blocks: int, block_size: int = 4, **options: Any) -> Harness:
        return Harness(make_table(gpu_blocks, cpu_blocks, block_size, **options), request.param, **options)

    return table


@pytest.fixture
def busy(make: Callable[..., Harness]) -> Harness:
    """A table with something of everything: hits in both tiers, requests, planned loads, open tickets."""
    t = make(16, 16, ranks=2)
    t.full(span(0, 16))
    t.wipe_gpu()
    t.open("loading", span(0, 16))
    t.open("hashed", t.unseen(9))
    t.admit_hashed("digests", [bytes([7]) * 32], 6)
    t.commit("hashed", 9)
    t.step()
    return t
