"""Bad input to the copy engine: a typed error that names the argument, and an engine that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kvtier import ConfigError, CopyEngine, HostMemory, MemoryLayout

WRONG_KINDS: list[Any] = [
    None,
    True,
    1,
    1.5,
    "x",
    "1",
    "\ud800",
    b"x",
    [],
    [1],
    {},
    {1},
    object(),
    np.arange(3),
    range(2),
]


def layout() -> MemoryLayout:
    return MemoryLayout.from_tensors(np.zeros((8, 64), np.uint8))


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    with CopyEngine(layout(), HostMemory(8, 64)) as engine:
        yield engine
        engine.submit_pairs(99, "store", [(0, 0)])
        assert engine.wait(30) == [(99, [])], "the engine goes on"


def refused(argument: str, call: Callable[[], object], *kinds: type[Exception]) -> None:
    with pytest.raises(kinds) as raised:
        call()
    assert argument in str(raised.value)
    if isinstance(raised.value, ConfigError):
        assert raised.value.argument.startswith(argument)
        assert raised.value.limit


@pytest.mark.parametrize("value", WRONG_KINDS, ids=repr)
def test_memories_of_the_wrong_kind(value: Any) -> None:
    refused("gpu", lambda: CopyEngine(value, HostMemory(8, 64)), TypeError)
    refused("cpu", lambda: CopyEngine(layout(), value), TypeError)


@pytest.mark.parametrize("value", [value for value in WRONG_KINDS if not isinstance(value, int)], ids=repr)
def test_calls_with_values_of_the_wrong_kind(engine: CopyEngine, value: Any) -> None:
    refused("plan", lambda: engine.submit(value), TypeError)
    refused("ticket", lambda: engine.submit_pairs(value, "load", [(0, 0)]), TypeError)
    refused("direction", lambda: engine.submit_pairs(1, value, [(0, 0)]), ConfigError)
    refused("direction", lambda: engine.inject_failures(value), ConfigError)
    refused("num_tickets", lambda: engine.inject_failures("load", None, value), TypeError)
    if not isinstance(value, float):
        refused("timeout_s", lambda: engine.wait(value), TypeError)
        refused("timeout_s", lambda: engine.close(value), TypeError)


@pytest.mark.parametrize(
    "pairs",
    [
        *(None, 7, 1.5, "x", b"x", {}, {1}, object(), range(2)),
        *([(0,)], [(0, 0), (0,)], [(0, 0, 0)], [[[0, 0]]], [("0", "0")], [(0.0, 0.0)], [(None, 0)], [([], 0)]),
        *([(0, 2**31)], [(0, 2**63)], [(0, 10**30)], [(-1, 0)], [(0, 8)], [(8, 0)], [(True, False)]),
    ],
    ids=repr,
)
def test_pairs(engine: CopyEngine, pairs: Any) -> None:
    refused("pairs", lambda: engine.submit_pairs(1, "store", pairs), ConfigError)


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), 86401, 10**30], ids=repr)
def test_times(engine: CopyEngine, value: Any) -> None:
    refused("timeout_s", lambda: engine.wait(value), ConfigError)
    refused("timeout_s", lambda: engine.close(value), ConfigError)


@pytest.mark.parametrize("value", [None, 1.5, "x", [], (1,), object()], ids=repr)
def test_a_dimension_of_the_wrong_kind(value: Any) -> None:
    refused("block_dim", lambda: MemoryLayout.from_tensors(np.zeros((8, 64)), block_dim=value), TypeError)
