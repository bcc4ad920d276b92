"""The engine's and the demo's tests need `kvtier[demo]`; without it they are left out, unless it is required."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]

if MISSING and not os.environ.get("KVTIER_REQUIRE_TORCH"):
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        terminalreporter.write_line(f"tests/python/engine was left out: {', '.join(MISSING)} not installed")
