"""Which implementations of the block table the tests run against, and how copies behave in them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def core_table() -> Any | None:
    """The compiled block table, or None where it was not built; with KVTIER_REQUIRE_CORE=1 its absence is an error."""
    try:
        from kvtier._core import BlockTable
    except ImportError:
        if os.environ.get("KVTIER_REQUIRE_CORE") == "1":
            raise
        # The parts written in Python can be tested without the core, which the package itself imports at once.
        package = ModuleType("kvtier")
        package.__path__ = list(importlib.util.find_spec("kvtier").submodule_search_locations)
        sys.modules["kvtier"] = package
        return None
    return BlockTable


CORE = core_table()

from kvtier.reference import ReferenceBlockTable  # noqa: E402
from table_harness import Harness  # noqa: E402

IMPLEMENTATIONS = {"reference": ReferenceBlockTable} | ({"core": CORE} if CORE else {})


@pytest.fixture(params=list(IMPLEMENTATIONS))
def make_table(request: pytest.FixtureRequest) -> Any:
    """The class of the block table under test."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=["early", "late"])
def T(request: pytest.FixtureRequest, make_table: Any) -> Callable[..., Harness]:  # noqa: N802
    """Makes a table as the scenarios do: `T(gpu, cpu, block)`; every call on it is checked."""

    def make(gpu_blocks: int, cpu_blocks: int, block_size: int = 4, **options: Any) -> Harness:
        return Harness(make_table(gpu_blocks, cpu_blocks, block_size, **options), request.param, **options)

    return make
