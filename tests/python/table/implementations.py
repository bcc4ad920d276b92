"""The implementations of the block table that the tests run against."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


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

IMPLEMENTATIONS = {"reference": ReferenceBlockTable} | ({"core": CORE} if CORE else {})
