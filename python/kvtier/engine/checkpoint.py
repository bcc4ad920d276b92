"""Where a `Model` comes from: a Hugging Face checkpoint folder, or deterministic random weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig

from kvtier.config import checked_integer
from kvtier.engine.model import FAMILIES, Model
from kvtier.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# What checkpoints may hold besides the weights: frequencies that are computed, and the second name of tied weights.
REDUNDANT = ("rotary_emb.inv_freq", "lm_head.weight")


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> Model:
    """Load a checkpoint folder: config.json, safetensors, and the tokenizer if there is one.

    Nothing is downloaded and no code of the checkpoint is run.

    Args:
        path: The folder.
        device: Where the weights go, as torch names it.
        dtype: Floating-point type to compute in; None: the checkpoint's own.

    Raises:
        ConfigError: The folder is malformed or of an unsupported architecture, or the device is not there.
    """
    if not isinstance(path, (str, Path)):
        raise ConfigError("model", repr(path), "the path of a folder")
    folder = Path(path)
    target = checked_device(device)
    config = _read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError("model", folder, "the folder has no *.safetensors file with weights")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        network, report = loaded
        network = network.to(target)
    except Exception as error:  # the libraries beneath raise a dozen kinds, none of them documented
        raise ConfigError("model", folder, f"the weights cannot be loaded: {_first_line(error)}") from error
    # transformers fills what is missing with random numbers, ignores what is too much, and only warns
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in report[fault])
        if fault == "unexpected_keys":
            names = [name for name in names if not name.endswith(REDUNDANT)]
        if names:
            raise ConfigError("model", folder, f"the weights do not fit config.json: {fault} {', '.join(names[:3])}")
    name = hashlib.sha256(config.to_json_string().encode() + str(folder.resolve()).encode()).hexdigest()
    return Model(network, name, _read_tokenizer(folder))


def random_model(
    config: PreTrainedConfig | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Make a model with random weights: the same seed makes the same weights on every run.

    Args:
        config: A transformers configuration of a supported family; None: a small Llama.
        seed: Seed of the weights, 0 .. 2**63 - 1.
        device: Where the weights go, as torch names it.
        dtype: Floating-point type to compute in.

    Raises:
        ConfigError: The configuration is not supported, or the device is not there.
    """
    target = checked_device(device)
    if not 0 <= checked_integer("seed", seed, "0 .. 2**63 - 1") < 2**63:
        raise ConfigError("seed", seed, "0 .. 2**63 - 1")
    config = small_llama() if config is None else config
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError("config", type(config).__name__, f"a transformers configuration of {', '.join(FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = AutoModelForCausalLM.from_config(config)
    network = network.to(device=target, dtype=dtype)
    return Model(network, hashlib.sha256(config.to_json_string().encode() + str(seed).encode()).hexdigest())


def small_llama() -> LlamaConfig:
    """The model that stands in when no checkpoint is given: a Llama of about 4 million weights."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2**17,
        # 1 / sqrt(hidden_size): attention that looks at some tokens more than at others, so that answers depend on
        # every block; at the customary 0.02 it would hardly tell two blocks apart
        initializer_range=0.0625,
        bos_token_id=None,
        eos_token_id=None,
    )


def checked_device(device: str) -> torch.device:
    """The torch device of that name, if this machine has it.

    Raises:
        ConfigError: The name is not one of a device, or the machine does not have it.
    """
    if not isinstance(device, str):
        raise ConfigError("device", repr(device), "the name of a device: cpu, cuda, cuda:1, ...")
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except Exception as error:  # torch raises RuntimeError, AssertionError or its own kinds, by backend
        raise ConfigError("device", device, f"a device of this machine: {_first_line(error)}") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError("device", device, "cpu or cuda")
    return target


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        if not folder.is_dir():
            raise ConfigError("model", folder, "not a folder")
        text = (folder / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("model", folder, f"config.json cannot be read: {_first_line(error)}") from error
    try:
        fields: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError("model", folder, f"config.json is not JSON: {_first_line(error)}") from error
    if not isinstance(fields, dict) or fields.get("model_type") not in FAMILIES:
        kind = fields.get("model_type") if isinstance(fields, dict) else None
        raise ConfigError("model", folder, f"config.json has model_type {kind!r}, not one of {', '.join(FAMILIES)}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ConfigError("model", folder, f"config.json is refused: {_first_line(error)}") from error
    return config


def _read_tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ConfigError("model", folder, f"the tokenizer cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
