"""A small model on disk, and engines over it with and without the connector; all in this process, on CPU."""

import os

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` sets it up")

MAX_MODEL_LEN = 512
GPU_BLOCKS = 24


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.08,  # the default makes every output the same
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture
def make_engine(model_dir):
    """Make an engine that ends with the test; `connector` are the connector's options, or None for none."""
    yield from _makers(model_dir)


@pytest.fixture(scope="module")
def make_shared_engine(model_dir):
    """As `make_engine`, for engines that end with the module's tests."""
    yield from _makers(model_dir)


def _makers(model_dir):
    import gc

    from vllm import LLM

    engines = []

    def make(connector=None, policy="recompute", **options):
        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector": "KvtierConnector",
                "kv_connector_module_path": "kvtier.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": connector,
            }
        defaults = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": 32,
            "num_gpu_blocks_override": GPU_BLOCKS,
            "disable_log_stats": True,
        }
        engine = LLM(model=model_dir, **defaults | {"kv_transfer_config": transfer} | options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()
