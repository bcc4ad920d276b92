"""The paged forward pass against transformers' own, on the same weights."""

from __future__ import annotations

import pytest
import torch
from kvtier.engine import KvMemory, Model, Segment, random_model
from kvtier.errors import ConfigError
from tiny_models import CONFIGS, SIZES, tiny_model, tokens_of, transformers_logits
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

# The promise: logits (standard deviation about 1) differ from transformers' by no more than this.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}
BLOCK = 4


def run_in_chunks(model: Model, memory: KvMemory, parts: list[tuple[list[int], list[int], list[int]]]) -> list:
    """Compute several requests together: (tokens, block ids, ends of chunks) each. Returns (request, end, logits)."""
    rows = []
    starts = [0] * len(parts)
    for turn in range(max(len(ends) for _, _, ends in parts)):
        batch = [(i, starts[i], part[2][turn]) for i, part in enumerate(parts) if turn < len(part[2])]
        flat = [token for i, start, end in batch for token in parts[i][0][start:end]]
        logits = model.forward(flat, [Segment(parts[i][1], start, end) for i, start, end in batch], memory)
        for (i, _, end), row in zip(batch, logits, strict=True):
            starts[i] = end
            rows.append((i, end, row))
    return rows


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_agree_with_transformers(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype)
    memory = model.make_memory(60, BLOCK)
    memory.tensor.fill_(float("nan"))  # nothing may be read before it was written
    scattered = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    a, b, c = tokens_of(1, 83), tokens_of(2, 40), tokens_of(3, 9)
    parts = [
        (a, scattered[:21], [1, 30, 64, 65, 83]),  # chunks that end inside and at the ends of blocks, and decode steps
        (b, scattered[21:31], [17, 18, 19, 40]),
        (c, scattered[31:34], [9]),
    ]
    expected = [transformers_logits(model, tokens) for tokens in (a, b, c)]
    rows = run_in_chunks(model, memory, parts)
    assert len(rows) == 10
    worst = max((row - expected[i][end - 1]).abs().max().item() for i, end, row in rows)
    assert worst <= LIMITS[dtype]
    assert expected[0].std() > 0.5  # the limit means something


def test_logits_depend_on_every_block() -> None:
    model = tiny_model("llama")
    tokens = tokens_of(1, 41)
    memory = model.make_memory(12, BLOCK)
    model.forward(tokens[:40], [Segment(range(11), 0, 40)], memory)
    right = model.forward(tokens[40:], [Segment(range(11), 40, 41)], memory)
    for block in range(10):
        saved = memory.tensor[block].clone()
        memory.tensor[block] = memory.tensor[(block + 1) % 10]
        wrong = model.forward(tokens[40:], [Segment(range(11), 40, 41)], memory)
        assert (wrong - right).abs().max() > 1e-3
        memory.tensor[block] = saved


def test_a_block_is_one_contiguous_piece() -> None:
    memory = tiny_model("qwen3").make_memory(5, BLOCK)
    assert memory.tensor.shape == (5, 3, 2, BLOCK, 2, 24)
    assert memory.tensor[0].is_contiguous()
    assert memory.tensor.stride(0) * memory.tensor.itemsize == memory.block_bytes == 3 * 2 * BLOCK * 2 * 24 * 8


def test_the_same_seed_makes_the_same_weights_and_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, two = random_model(CONFIGS["llama"], seed=1), random_model(CONFIGS["llama"], seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    other = random_model(CONFIGS["llama"], seed=2)
    weights = [model.network.model.layers[1].mlp.up_proj.weight for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one.name == two.name != other.name


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MistralConfig(**SIZES), "llama, qwen2, qwen3"),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding"),
        (Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
    ids=["family", "qwen2-window", "qwen3-window", "dynamic-rope"],
)
def test_what_it_cannot_compute_is_refused(config: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        random_model(config)
    assert caught.value.argument == "model"


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        random_model(CONFIGS["llama"], device=device)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_outside_its_limits_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed"):
        random_model(CONFIGS["llama"], seed=seed)


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_blocks") as caught:
        tiny_model("llama").make_memory(2**24, 2**16)
    assert "bytes" in caught.value.limit
