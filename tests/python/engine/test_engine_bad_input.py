"""Bad input to the engine: refused where it is given, with the argument's name, and the engine goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from kvtier.engine import Engine, Sampling, load_model, random_model
from kvtier.errors import ConfigError
from tiny_models import tiny_model, tokens_of

NO_INTEGERS: list[Any] = [None, True, 1.5, "1", b"1", [1], object()]


def refused(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises((ConfigError, TypeError)) as raised:
        call()
    assert argument in str(raised.value)


@pytest.mark.parametrize("value", [*NO_INTEGERS, 0, -1, -(10**30)], ids=repr)
def test_sizes(value: Any) -> None:
    for argument in ("gpu_blocks", "block_size", "max_step_tokens", "max_running"):
        options = {"gpu_blocks": 8, "block_size": 4} | {argument: value}
        refused(argument, lambda options=options: Engine(tiny_model("llama"), **options))


@pytest.mark.parametrize("value", [*NO_INTEGERS, -1, 2**63, 10**30], ids=repr)
def test_sampling(value: Any) -> None:
    refused("seed", lambda: Sampling(seed=value))
    refused("seed", lambda: random_model(seed=value))
    if value not in (2**63, 10**30):
        refused("max_new_tokens", lambda: Sampling(max_new_tokens=value))
        refused("top_k", lambda: Sampling(top_k=value))
    for argument in ("temperature", "top_p"):
        if not isinstance(value, (int, float)) or value == -1:
            refused(argument, lambda argument=argument: Sampling(**{argument: value}))


@pytest.mark.parametrize(
    ("argument", "prompt", "options"),
    [
        *(("prompt", prompt, {}) for prompt in (None, 1, "12", b"12", {1}, iter([1]), itertools.count())),
        *(("prompt", prompt, {}) for prompt in ([], [-1], [10**9], [10**30], [1.0], ["1"], [None], [True], [[1]])),
        *(("sampling", [1], {"sampling": value}) for value in (0, "greedy", {}, {"seed": 1}, Sampling)),
        *(
            ("request_id", [1], {"request_id": value})
            for value in (1.5, b"r", ("r",), True, 2**63, "\ud800", "live", "foreign")
        ),
        *(("salt", [1], {"salt": value}) for value in (1.5, ("x",), True, 2**127, "\ud800")),
    ],
    ids=repr,
)
def test_requests(argument: str, prompt: Any, options: dict[str, Any]) -> None:
    engine = Engine(tiny_model("llama"), gpu_blocks=16, block_size=4)
    engine.table.admit("foreign", [1])  # not the engine's
    live = engine.submit(tokens_of(0, 5), Sampling(max_new_tokens=3), request_id="live")
    refused(argument, lambda: engine.submit(prompt, **options))
    assert list(engine.waiting) == [live]
    while live.finish_reason is None:
        engine.step()
    assert len(live.answer) == 3


@pytest.mark.parametrize(
    "value", [None, 7, b"cpu", ["cpu"], "", "tpu9", "x" * 5000, "meta"], ids=lambda value: repr(value)[:9]
)
def test_devices_and_folders(value: Any) -> None:
    refused("device", lambda: random_model(device=value))
    refused("model", lambda: load_model(value))


@pytest.mark.parametrize("value", [0, "llama", {}, object()], ids=repr)
def test_configurations(value: Any) -> None:
    refused("config", lambda: random_model(value))
