"""One round of every measurement of kvtier from Python. Started by `bench_side_by_side.py`."""

from __future__ import annotations

import array

from kvtier import BlockTable
from round_server import serve
from workload import BLOCK_SIZE, Hits, Misses, Spill, mean, microseconds


def main() -> None:
    hits = {size: Hits(blocks, 256) for size, blocks in [("20k", 20_000), ("1M", 1_000_000)]}
    small_hits, misses, small_misses = Hits(20_000, 3), Misses(20_000, 40_000, 256), Misses(20_000, 40_000, 3)
    spill = Spill()
    hashers = {
        "hash 256": BlockTable(1, 0, BLOCK_SIZE),
        "xxh3 256": BlockTable(1, 0, BLOCK_SIZE, hash="xxh3"),
    }
    tokens = array.array("I", range(256 * BLOCK_SIZE))

    def prepared(prepare, call, finish=None) -> float:
        prepare()
        time = microseconds(call)
        if finish is not None:
            finish()
        return time

    def one_round() -> dict[str, float]:
        figures = {f"hit 256, {size} blocks": mean(microseconds(hit) for _ in range(200)) for size, hit in hits.items()}
        figures["hit 3"] = mean(microseconds(small_hits) for _ in range(1000))
        figures["miss 256"] = mean(prepared(misses.prepare, misses) for _ in range(50))
        figures["miss 3"] = mean(prepared(small_misses.prepare, small_misses) for _ in range(300))
        figures["store side 1280"] = mean(
            prepared(spill.prepare_store, spill.store, spill.finish_store) for _ in range(10)
        )
        figures["hit side 1280"] = mean(prepared(spill.prepare_hit, spill.hit, spill.finish_hit) for _ in range(14))
        for name, table in hashers.items():
            figures[name] = mean(microseconds(lambda table=table: table.block_hashes(tokens)) for _ in range(50))
        return figures

    serve(one_round)


if __name__ == "__main__":
    main()
