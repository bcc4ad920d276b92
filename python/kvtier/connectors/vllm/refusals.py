"""What the connector does not support, said at start and by name."""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigError

__all__ = ["check_supported"]


def check_supported(config: Any, kv_cache_config: Any) -> None:
    """Refuse a configuration that the connector cannot serve.

    Args:
        config: The `VllmConfig`.
        kv_cache_config: The `KVCacheConfig`.

    Raises:
        ConfigError: A feature is not supported; the text names it.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if not config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching", False, "True: KvtierConnector finds blocks by vLLM's block hashes")
    if config.model_config.is_encoder_decoder:
        raise ConfigError("model", config.model_config.model, "KvtierConnector does not support encoder-decoder models")
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in ("sha256", "sha256_cbor"):
        limit = "sha256 or sha256_cbor: KvtierConnector needs block hashes of 32 bytes"
        raise ConfigError("prefix_caching_hash_algo", algorithm, limit)
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(name, size, "1: KvtierConnector does not support this parallelism")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError("kv_cache_groups", kinds, "one group: KvtierConnector does not support hybrid models")
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        limit = "FullAttentionSpec: KvtierConnector supports full attention only"
        raise ConfigError("kv_cache_spec", type(spec).__name__, limit)
    for feature in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, feature, None) is not None:
            raise ConfigError(feature, getattr(spec, feature), "None: KvtierConnector supports full attention only")
    hash_block_size = kv_cache_config.hash_block_size
    if hash_block_size is not None and hash_block_size != spec.block_size:
        raise ConfigError("hash_block_size", hash_block_size, f"{spec.block_size}, the block size")
