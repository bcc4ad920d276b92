"""Checkpoint folders: good ones give transformers' answers, malformed ones a ConfigError that says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtier.engine import Engine, Sampling, load_model
from kvtier.errors import ConfigError
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tokens_of, transformers_answer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder, in several shards."""
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen2"
    tiny_model("qwen2", torch.float32).network.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_model(folder)
    assert caught.value.argument == "model"
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["llama-llama3-rope", "qwen2-tied", "qwen3"])
def test_a_saved_model_comes_back(name: str, tmp_path: Path) -> None:
    original = tiny_model(name, torch.float32)
    original.network.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float64)
    assert model.tokenizer is None
    prompt = tokens_of(3, 50)
    with Engine(model, gpu_blocks=40, block_size=4) as engine:
        answers = engine.generate([prompt], Sampling(max_new_tokens=10))
    assert answers == [transformers_answer(model, tuple(prompt), 10)]
    assert answers == [transformers_answer(original, tuple(prompt), 10)]


def test_shards_and_the_checkpoints_own_dtype(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert load_model(folder).dtype == torch.float32
    edit_config(folder, dtype="bfloat16")
    assert load_model(folder).dtype == torch.bfloat16


def test_eos_tokens_are_read(folder: Path) -> None:
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | {"eos_token_id": [7, 9]}))
    assert load_model(folder).eos_token_ids == {7, 9}


def test_the_tokenizer_is_loaded_if_there_is_one(folder: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    assert load_model(folder).tokenizer.convert_tokens_to_ids("b") == 1
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer" in refusal(folder).limit


def test_no_folder(tmp_path: Path) -> None:
    assert "not a folder" in refusal(tmp_path / "absent").limit
    (tmp_path / "file").write_text("")
    assert "not a folder" in refusal(tmp_path / "file").limit


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder).limit


@pytest.mark.parametrize("text", [b"", b"{", b"[1, 2]", b'"llama"', b"\xff\xfe", b'{"model_type": "qwen2"'])
def test_broken_config(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    assert "config.json" in refusal(folder).limit


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "no-such-model", None, 3, ["llama"]])
def test_unsupported_architecture(folder: Path, model_type: object) -> None:
    edit_config(folder, model_type=model_type)
    assert "llama, qwen2, qwen3" in refusal(folder).limit


def test_a_sliding_window_is_refused(folder: Path) -> None:
    edit_config(folder, use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=None)
    assert "full attention" in refusal(folder).limit


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"hidden_size": 0},
        {"hidden_size": "wide"},
        {"hidden_size": 96},
        {"vocab_size": 50},
        {"num_hidden_layers": 4},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 2},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 4},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": "many"},
        {"hidden_act": "no-such-function"},
        {"rope_parameters": {"rope_type": "no-such-rope", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "llama3"}},
        {"rope_parameters": 7},
        {"intermediate_size": None},
        {"rms_norm_eps": "small"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
    ids=str,
)
def test_config_values_that_make_no_sense_or_do_not_fit_the_weights(folder: Path, changes: dict) -> None:
    edit_config(folder, layer_types=None, **changes)
    refusal(folder)


def test_no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    assert "safetensors" in refusal(folder).limit


def test_a_pickle_is_not_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "safetensors" in refusal(folder).limit


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 5000, -1], ids=lambda kept: f"{kept}-bytes")
def test_truncated_weights(folder: Path, kept: int) -> None:
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:kept])
    assert "weights" in refusal(folder).limit


def test_a_missing_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()
    assert "weights" in refusal(folder).limit


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../../x"}}'])
def test_a_broken_index_of_shards(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "weights" in refusal(folder).limit


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_weights_that_are_not_there(name: str, tmp_path: Path) -> None:
    """transformers would fill them with random numbers and go on."""
    tiny_model("qwen2", torch.float32).network.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    assert name in refusal(tmp_path).limit
