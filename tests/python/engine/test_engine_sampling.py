"""Seeded sampling: the right distribution, the right limits, and no dependence on the batch."""

from __future__ import annotations

import pytest
import torch
from kvtier.engine import Engine, Sampling
from kvtier.engine.request import choose_token
from kvtier.errors import ConfigError
from tiny_models import tiny_model, tokens_of

LOGITS = torch.tensor([0.0, 2.0, -1.0, 1.0, 1.5])


def draw(sampling: Sampling, times: int = 4000) -> torch.Tensor:
    """How often each token is drawn, as a share."""
    generator = torch.Generator().manual_seed(sampling.seed)
    drawn = torch.tensor([choose_token(LOGITS, sampling, generator) for _ in range(times)])
    return torch.bincount(drawn, minlength=len(LOGITS)) / times


def test_temperature_zero_takes_the_most_likely() -> None:
    assert draw(Sampling(), 20).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_shares_follow_the_softmax(temperature: float) -> None:
    shares = draw(Sampling(temperature=temperature))
    assert (shares - (LOGITS / temperature).softmax(-1)).abs().max() < 0.03


def test_top_k() -> None:
    shares = draw(Sampling(temperature=1.0, top_k=2))
    kept = LOGITS[[1, 4]].softmax(-1)
    assert shares[[0, 2, 3]].sum() == 0
    assert (shares[[1, 4]] - kept).abs().max() < 0.03
    assert draw(Sampling(temperature=1.0, top_k=99))[2] > 0


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    softmax = LOGITS.softmax(-1)  # 0.45, 0.27, 0.17, 0.06, 0.02 in descending order
    shares = draw(Sampling(temperature=1.0, top_p=float(softmax[1]) + 0.01))
    assert shares[[0, 2, 3]].sum() == 0
    assert shares[1] > shares[4] > 0
    assert draw(Sampling(temperature=1.0, top_p=0.01)).tolist() == [0, 1, 0, 0, 0]


def test_extreme_temperatures_stay_finite() -> None:
    assert draw(Sampling(temperature=1e-300), 20).tolist() == [0, 1, 0, 0, 0]
    assert (draw(Sampling(temperature=1e300)) - 0.2).abs().max() < 0.03


def test_what_is_drawn_does_not_depend_on_the_batch() -> None:
    sampling = Sampling(max_new_tokens=30, temperature=1.2, top_k=50, top_p=0.95, seed=4)
    prompt, others = tokens_of(1, 37), [tokens_of(i, 3 * i) for i in range(2, 9)]
    with Engine(tiny_model("llama"), gpu_blocks=300, block_size=4) as engine:
        (alone,) = engine.generate([prompt], sampling)
    with Engine(tiny_model("llama"), gpu_blocks=300, block_size=4, max_step_tokens=19) as engine:
        for other in others:
            engine.submit(other, Sampling(max_new_tokens=25, temperature=0.7, seed=8))
        assert engine.generate([prompt], sampling) == [alone]
        other_seed = Sampling(max_new_tokens=30, temperature=1.2, top_k=50, top_p=0.95, seed=5)
        assert engine.generate([prompt], other_seed) != [alone]


def test_an_answer_ends_at_eos_unless_told_to_go_on() -> None:
    model = tiny_model("qwen2")
    prompt = tokens_of(5, 21)
    with Engine(model, gpu_blocks=100, block_size=4) as engine:
        (answer,) = engine.generate([prompt], Sampling(max_new_tokens=20))
        stop = answer[7]
        first = answer.index(stop)
        model.eos_token_ids = frozenset([stop])
        try:
            requests = [
                engine.submit(prompt, Sampling(max_new_tokens=20)),
                engine.submit(prompt, Sampling(max_new_tokens=20, ignore_eos=True)),
            ]
            while any(request.finish_reason is None for request in requests):
                engine.step()
        finally:
            model.eos_token_ids = frozenset()
    assert [request.finish_reason for request in requests] == ["eos", "length"]
    assert requests[0].answer == answer[: first + 1]
    assert requests[1].answer == answer


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_limits(argument: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**{argument: value})
    assert caught.value.argument == argument
