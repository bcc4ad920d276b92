"""One round of SGLang's Rust tree core, from its wheel. Started by `bench_side_by_side.py`.

The compiled core is loaded alone, without the rest of the package. Tokens in, token slots out: its match hashes nothing
and compares the tokens themselves. Page size 16, documents of 256 pages; it allocates no slots, they are given.
"""

from __future__ import annotations

import array
import importlib.util
import time

import numpy as np
import torch
from round_server import serve

PAGE = 16
TOKENS = 256 * PAGE
DOCUMENTS = 78


def load():
    root = importlib.util.find_spec("sglang").submodule_search_locations[0]
    from pathlib import Path

    path = next(Path(root, "srt/mem_cache/rust_tree_core").glob("mem_cache.*.so"))
    spec = importlib.util.spec_from_file_location("mem_cache", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    core = load()
    full = [0]  # the component "full attention"
    init = core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=PAGE, device="cpu")
    documents = [
        array.array("q", tokens) for tokens in np.random.default_rng(1).integers(0, 2**20, (DOCUMENTS, TOKENS)).tolist()
    ]
    slots = [torch.arange(n * TOKENS, (n + 1) * TOKENS, dtype=torch.int64) for n in range(DOCUMENTS)]

    def timed(call) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    def one_round() -> dict[str, float]:
        tree = core.RustUnifiedTreeCoreBinding(init, full)
        inserted = sum(
            timed(lambda n=n: tree.insert(core.InsertParamsBinding(key=documents[n], value=slots[n])))
            for n in range(DOCUMENTS)
        )
        assert tree.match_prefix(core.MatchParamsBinding(key=documents[3])).device_prefix_len == TOKENS
        matched = sum(
            timed(lambda document=document: tree.match_prefix(core.MatchParamsBinding(key=document)))
            for document in documents
        )
        return {"lookup 256": matched / DOCUMENTS, "register 256": inserted / DOCUMENTS}

    serve(one_round)


if __name__ == "__main__":
    main()
