"""KV bytes by block hash: tokens alone do not notice swapped blocks."""

import hashlib


def scheduler_of(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler


def sides_of(engine):
    """Both sides of the connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return scheduler_of(engine).connector._scheduler, get_kv_transfer_group()._worker


def compare_kv(engine, known):
    """Compare every cached Gpu block with what was seen first under its hash.

    Blocks that were computed in other chunks may differ in the last bits, so the bytes have to be those of the first
    computation, or close to them where they were computed again.
    """
    import numpy as np
    import torch

    worker = sides_of(engine)[1]
    tensors = worker.engine.gpu._owner
    for block in scheduler_of(engine).kv_cache_manager.block_pool.blocks:
        if block.block_hash is None:
            continue
        rows = [tensor[block.block_id].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
        values = [tensor[block.block_id].float().numpy() for tensor in tensors]
        digest = hashlib.sha256(b"".join(rows)).digest()
        first_digest, first_values = known.setdefault(block.block_hash, (digest, [value.copy() for value in values]))
        if digest == first_digest:
            continue
        same = all(np.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in zip(values, first_values, strict=True))
        assert same, f"block {block.block_id} has other bytes than its hash had first"
