"""KV bytes on every worker, by block hash: two ranks, a child of MultiConnector, fp8.

The documents are asked one by one, so whatever has a hash is computed once and then loaded: the bytes have to be the
same to the last bit, on each rank.
"""

import os
import pathlib
import re
import time

import pytest
from kv_bytes import scheduler_of
from runs import documents, one_by_one, settle

BLOCKS = 9
OWN = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_gib": 0.05, "load_choice": "always"},
}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [OWN]}}
END_S = 20


def digests_of(worker, block_ids):
    """Runs on each worker: a digest of each block, all layers."""
    import hashlib

    import torch

    tensors = getattr(worker, "worker", worker).model_runner.kv_caches
    rows = [[tensor[at].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors] for at in block_ids]
    return [hashlib.sha256(b"".join(row)).digest() for row in rows]


def swap_host_blocks(worker, rank):
    """Runs on each worker: on one rank every host block gets the bytes of the next."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    side = getattr(connector, "_connectors", [connector])[0]._worker
    if side._rank == rank:
        memory = side.engine.cpu.array()
        used = [row for row in range(len(memory)) if memory[row].any()]
        memory[used] = memory[used[1:] + used[:1]]
    return side._rank


def on_workers(engine, function, *arguments):
    return engine.llm_engine.engine_core.engine_core.model_executor.collective_rpc(function, args=arguments)


def compare(engine, known):
    """Number of blocks that were known; all have the bytes that they had first, on each rank."""
    blocks = scheduler_of(engine).kv_cache_manager.block_pool.blocks
    cached = [block for block in blocks if block.block_hash is not None]
    ranks = on_workers(engine, digests_of, [block.block_id for block in cached])
    num_known = 0
    for block, digests in zip(cached, zip(*ranks, strict=True), strict=True):
        num_known += block.block_hash in known
        first = known.setdefault(block.block_hash, digests)
        assert digests == first, f"block {block.block_id} has other bytes than its hash had first"
    return num_known


def tables_of(engine):
    connector = scheduler_of(engine).connector
    return getattr(connector, "_connectors", [connector])[0]._scheduler


def shared_memory_of(pids):
    """Files in /dev/shm that processes have mapped."""
    maps = [pathlib.Path("/proc", str(pid), "maps").read_text() for pid in pids]
    return set(re.findall(r"/dev/shm/\S+", "".join(maps)))


@pytest.mark.parametrize(
    ("transfer", "ranks", "options"),
    [
        (OWN, 2, {"tensor_parallel_size": 2}),
        (MULTI, 1, {}),
        (OWN, 1, {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    ],
    ids=["tensor-parallel", "multi-connector", "fp8"],
)
def test_loaded_blocks_have_the_bytes_that_were_stored(make_engine, monkeypatch, transfer, ranks, options):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    engine = make_engine(kv_transfer_config=transfer, **options)
    docs = documents(5, 290, seed=40)
    known = {}
    tokens = []

    def ask(doc):
        tokens.append(one_by_one(engine, [doc])[0])
        settle(engine)
        return compare(engine, known)

    for doc in docs:
        ask(doc)
    assert len(known) == len(docs) * BLOCKS
    # The pool holds two of the documents; each comes back whole, and is compared at once.
    assert all(ask(doc) >= BLOCKS for doc in docs)
    assert tokens[:5] == tokens[5:]
    stats = tables_of(engine).table.stats()
    assert stats["loaded_blocks"] >= 0.95 * len(docs) * BLOCKS
    assert stats["load_failed_blocks"] == 0
    tables_of(engine).table.audit()

    # One rank that corrupts is enough to be noticed.
    assert sorted(on_workers(engine, swap_host_blocks, ranks - 1)) == list(range(ranks))
    with pytest.raises(AssertionError, match="other bytes"):
        ask(docs[0])

    if ranks > 1:
        processes = [worker.proc for worker in engine.llm_engine.engine_core.engine_core.model_executor.workers]
        assert len(processes) == ranks
        assert all(process.is_alive() for process in processes)
        used = shared_memory_of([os.getpid()] + [process.pid for process in processes])
        start = time.monotonic()
        engine.llm_engine.engine_core.shutdown()
        assert time.monotonic() < start + END_S, "the engine did not end within seconds"
        assert not any(process.is_alive() for process in processes)
        assert not [name for name in used if os.path.exists(name)]
