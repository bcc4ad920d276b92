"""What the connector does not support is refused at start, by the feature's name."""

from types import SimpleNamespace

import pytest
from kvtier.connectors.vllm.refusals import check_supported
from kvtier.errors import ConfigError


def full_attention(**changes):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(**{"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32} | changes)


def sliding_window():
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)


def configs(specs, *, prefix_caching=True, algorithm="sha256", encoder=False, **parallel):
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching, prefix_caching_hash_algo=algorithm),
        model_config=SimpleNamespace(is_encoder_decoder=encoder, model="a-model"),
        parallel_config=SimpleNamespace(**sizes | parallel),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0"]) for spec in specs]
    return config, SimpleNamespace(kv_cache_groups=groups, hash_block_size=32)


def test_what_is_supported_is_not_refused():
    check_supported(*configs([full_attention()]))
    check_supported(*configs([full_attention()], algorithm="sha256_cbor"))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: configs([full_attention()], prefix_caching=False), "enable_prefix_caching"),
        (lambda: configs([full_attention()], algorithm="xxhash"), "prefix_caching_hash_algo"),
        (lambda: configs([full_attention()], encoder=True), "encoder-decoder"),
        (lambda: configs([full_attention()], pipeline_parallel_size=2), "pipeline_parallel_size"),
        (lambda: configs([full_attention()], decode_context_parallel_size=2), "decode_context_parallel_size"),
        (lambda: configs([full_attention(), sliding_window()]), "hybrid"),
        (lambda: configs([sliding_window()]), "SlidingWindowSpec"),
        (lambda: configs([full_attention(sliding_window=64)]), "sliding_window"),
    ],
    ids=["no-cache", "hash", "encoder", "pipeline", "context", "hybrid", "window", "window-of-full-attention"],
)
def test_what_is_not_supported_is_refused_by_name(make, name):
    with pytest.raises(ConfigError, match=name):
        check_supported(*make())


def test_an_engine_does_not_start_with_what_is_refused(make_engine):
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make_engine({"host_gib": 0.05}, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="store_mode"):
        make_engine({"host_gib": 0.05, "store_mode": "never"})
