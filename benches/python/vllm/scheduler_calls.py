"""The calls of one run on our table and on vLLM's offloading manager, replayed in turn. Started by `bench_vllm.py`.

A run of the real engine is recorded below the connector: every call of its table, and the requests' begins and ends.
Then a fresh `HostTable` and a fresh `CPUOffloadingManager` are driven with it; the manager with what vLLM's own
connector calls for the same: `on_new_request`, `lookup` per block up to the first miss, `prepare_load`,
`complete_load`, `prepare_store`, `complete_store`, `on_request_finished`. Neither keeps events. The two evict
differently, so each loads what it has itself; how many blocks that were is told. Keys and digests are made before the
clock starts; the Python of either connector around these calls is left out.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

from engine import Engine
from kvtier._core import HostTable
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

BLOCK = 32
DIGEST_BYTES = 32
Calls = list[tuple[str, Any]]


class Recorder:
    """Stands in for the table, hands every call on and keeps those that a manager has as well."""

    def __init__(self, table: HostTable, calls: Calls) -> None:
        self._table = table
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def lookup(self, digests: bytes) -> Any:
        """As the table's."""
        self._calls.append(("lookup", digests))
        return self._table.lookup(digests)

    def load(self, digests: bytes, gpu_ids: list[int]) -> Any:
        """As the table's."""
        planned = self._table.load(digests, gpu_ids)
        self._calls.append(("load", (digests, list(gpu_ids), planned[0] if planned else None)))
        return planned

    def offer(self, digests: bytes, gpu_ids: list[int], max_blocks: int | None, only_repeated: bool) -> Any:
        """As the table's."""
        planned = self._table.offer(digests, gpu_ids, max_blocks, only_repeated)
        self._calls.append(("offer", (digests, list(gpu_ids), planned[0])))
        return planned

    def complete(self, ticket: int, rank: int, failed: list[int]) -> bool:
        """As the table's."""
        assert not failed
        self._calls.append(("complete", ticket))
        return self._table.complete(ticket, rank, failed)


def record(model: str, quick: bool) -> tuple[Calls, int, int]:
    """Documents that come back from a host tier which does not hold all of them: calls, steps, slots."""
    count, num_tokens = (8, 256) if quick else (40, 1024)
    blocks = num_tokens // BLOCK
    num_slots = 3 * count // 4 * blocks
    settings = {"max_tokens": num_tokens + 64, "gpu_blocks": count // 4 * (blocks + 1) + 1}
    run = Engine(model=model, connector="kvtier", host_gib=num_slots * BLOCK * 4 * 2 * 4 * 32 * 4 / 2**30, **settings)
    side = run.scheduler.connector._scheduler
    calls: Calls = []
    num_slots = side.table.cpu_blocks
    side.table = side.stores._table = Recorder(side.table, calls)
    add, drop = side.add, side.drop
    side.add = lambda request: (calls.append(("begin", request.request_id)), add(request))
    side.drop = lambda request_id: (calls.append(("end", request_id)), drop(request_id))
    rng = random.Random(9)
    seeds = [2000 + rng.randrange(count) for _ in range(3 * count)]
    steps = sum(
        run.serve([seed], num_tokens, 8, together=False)["num_steps"] for seed in [*range(2000, 2000 + count), *seeds]
    )
    return calls, steps, num_slots


def replay_ours(calls: Calls, num_slots: int) -> tuple[float, dict[str, int]]:
    """Seconds, and blocks loaded and stored."""
    table = HostTable(num_slots)
    tickets: dict[int, int] = {}
    spent = num_hits = 0
    for name, argument in calls:
        if name in ("begin", "end"):
            continue
        start = time.perf_counter_ns()
        if name == "lookup":
            num_hits = table.lookup(argument)[0]
        elif name == "complete":
            if argument in tickets:
                table.complete(tickets[argument])
        else:
            digests, gpu_ids, ticket = argument
            if name == "load":
                planned = table.load(digests[: num_hits * DIGEST_BYTES], gpu_ids[:num_hits])
            else:
                planned = table.offer(digests, gpu_ids)
            if planned is not None and planned[0] is not None:
                tickets[ticket] = planned[0]
        spent += time.perf_counter_ns() - start
    table.audit()
    stats = table.stats()
    return spent / 1e9, {name: stats[f"{name}_blocks"] for name in ("loaded", "stored")}


def split(digests: bytes) -> list[Any]:
    """The manager's keys."""
    return [make_offload_key(digests[at : at + DIGEST_BYTES], 0) for at in range(0, len(digests), DIGEST_BYTES)]


def replay_theirs(calls: Calls, num_slots: int) -> tuple[float, dict[str, int]]:
    """As `replay_ours`."""
    manager = CPUOffloadingManager(num_slots, cache_policy="lru")
    keys_of = {
        "lookup": split,
        "load": lambda argument: split(argument[0]),
        "offer": lambda argument: split(argument[0]),
    }
    prepared = [(name, argument, keys_of.get(name, lambda _: [])(argument)) for name, argument in calls]
    jobs: dict[int, tuple[Any, Any, ReqContext]] = {}
    context = ReqContext(req_id="none")
    counts = {"loaded": 0, "stored": 0}
    spent = num_hits = 0
    for name, argument, keys in prepared:
        if name == "begin":
            context = ReqContext(req_id=argument)
        start = time.perf_counter_ns()
        if name == "begin":
            manager.on_new_request(context)
        elif name == "end":
            manager.on_request_finished(context)
        elif name == "lookup":
            num_hits = 0
            for key in keys:
                if manager.lookup(key, context).name != "HIT":
                    break
                num_hits += 1
        elif name == "load":
            hits = keys[:num_hits]
            manager.prepare_load(hits, context)
            jobs[argument[2]] = (manager.complete_load, hits, context)
            counts["loaded"] += len(hits)
        elif name == "offer":
            output = manager.prepare_store(keys, context)
            if output is not None and output.keys_to_store:
                jobs[argument[2]] = (manager.complete_store, output.keys_to_store, context)
                counts["stored"] += len(output.keys_to_store)
        elif argument in jobs:
            end, done, its_context = jobs.pop(argument)
            end(done, its_context)
        spent += time.perf_counter_ns() - start
    return spent / 1e9, counts


def main() -> None:
    model, rounds, quick = sys.argv[1], int(sys.argv[2]), "--quick" in sys.argv
    calls, steps, num_slots = record(model, quick)
    systems = {"kvtier's table": replay_ours, "vLLM's offloading manager": replay_theirs}
    spent: dict[str, list[float]] = {name: [] for name in systems}
    blocks = {}
    for _ in range(rounds):
        for name, replay in systems.items():
            seconds, blocks[name] = replay(calls, num_slots)
            spent[name].append(1e6 * seconds / steps)
    counts: dict[str, int] = {}
    for name, _ in calls:
        counts[name] = counts.get(name, 0) + 1
    result = {
        "rounds": rounds,
        "steps": steps,
        "calls": counts,
        "blocks": blocks,
        "us_per_step": {
            name: {"min": min(of), "median": statistics.median(of), "max": max(of)} for name, of in spent.items()
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
