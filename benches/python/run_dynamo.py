"""One round of Dynamo's RadixTree (`ai-dynamo-runtime`). Started by `bench_side_by_side.py`.

A router's index: it finds and registers blocks; it allocates, holds and frees nothing.
"""

from __future__ import annotations

import json
import time

import numpy as np
from dynamo._core import RadixTree, compute_block_hash_for_seq
from round_server import serve

BLOCK_SIZE = 16
DOCUMENTS = 78  # of 256 blocks: 20k blocks


def main() -> None:
    tree = RadixTree()
    numbers = np.random.default_rng(1).integers(1, 2**62, (DOCUMENTS, 256)).tolist()
    events = [
        json.dumps(
            {
                "event_id": n,
                "data": {
                    "stored": {
                        "parent_hash": None,
                        "blocks": [{"block_hash": number, "tokens_hash": number} for number in document],
                    }
                },
            }
        ).encode()
        for n, document in enumerate(numbers)
    ]
    tokens = list(range(256 * BLOCK_SIZE))

    def timed(call) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    def one_round() -> dict[str, float]:
        tree.clear_all_blocks(1)
        register = sum(timed(lambda event=event: tree.apply_event(1, event)) for event in events) / len(events)
        assert tree.find_matches(numbers[3]).scores in ({1: 256}, {(1, 0): 256})
        found = sum(timed(lambda document=document: tree.find_matches(document)) for document in numbers)
        return {
            "lookup 256": found / len(numbers),
            "register 256": register,
            "hash 256": sum(timed(lambda: compute_block_hash_for_seq(tokens, BLOCK_SIZE)) for _ in range(20)) / 20,
        }

    serve(one_round)


if __name__ == "__main__":
    main()
