"""Tiny random models for the engine's tests, and what transformers itself makes of them."""

from __future__ import annotations

from functools import cache

import torch
from kvtier.engine import Model, random_model
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide, so that answers depend on every block
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-wide-heads": LlamaConfig(**SIZES, head_dim=20),
    "llama-biases-tied": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-yarn-rope": LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
}


@cache
def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """The model of that name; in float64 rounding differences between batch shapes decide no test."""
    model = random_model(CONFIGS[name], seed=11, dtype=dtype)
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide that they are used
        generator = torch.Generator().manual_seed(5)
        for key, parameter in model.network.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (num_tokens,), generator=generator).tolist()


@torch.inference_mode()
def transformers_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits of every position by transformers' own forward: shape (tokens, vocab_size)."""
    logits: torch.Tensor = model.network(torch.tensor([tokens])).logits[0]
    return logits


@cache
def transformers_answer(model: Model, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """Greedy answer by transformers' own `generate()`."""
    ids = torch.tensor([prompt])
    out = model.network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
