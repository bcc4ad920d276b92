"""kvtier's connector in vLLM on CPU: documents that come back, time to first token, what it costs where it cannot help.

Run: make bench-vllm, or
  .venv-vllm/bin/python benches/python/vllm/bench_vllm.py [--rounds 7] [--quick] [--write]

Each engine is a process that serves one job at a time; the jobs of a round follow each other, so that all systems meet
the same machine. With `--write` all figures go to benches/results/vllm-<date>.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import engine as engine_module

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
BLOCK = 32
ANSWER_S = 600


def environment_of_engines() -> dict[str, str]:
    """One thread, one process, no network."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


class Engine:
    """An engine's process."""

    def __init__(self, connector: str, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine.py"), json.dumps({"connector": connector, **settings})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment_of_engines(),
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            self._process.kill()
            raise TimeoutError(f"no answer within {ANSWER_S} s")
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the engine ended with exit status {self._process.wait(ANSWER_S)}")
        return line

    def serve(self, seeds: list[int], num_tokens: int, max_new: int = 1, **how: bool) -> dict[str, Any]:
        """One job."""
        assert self._process.stdin is not None
        job = {"seeds": seeds, "num_tokens": num_tokens, "max_new": max_new, "together": False, **how}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return json.loads(self._line())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def spread(values: list[float]) -> dict[str, float]:
    """Least, middle and greatest."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def quartiles(values: list[float]) -> dict[str, float]:
    """Spread, and the quartiles."""
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {**spread(values), "lower_quartile": lower, "upper_quartile": upper}


def long_documents(model: str, quick: bool) -> dict[str, Any]:
    """All documents asked once, then again in another order: pool for a quarter of them, host memory for all."""
    count, num_tokens = (8, 256) if quick else (40, 1024)
    blocks = -(-num_tokens // BLOCK) + 1
    pool = count // 4 * blocks + 1
    host_gib = (count + 2) * blocks * BLOCK * 4 * 2 * 4 * 32 * 4 / 2**30
    order = list(range(count))
    second = order[1::2] + order[::2]
    figures: dict[str, Any] = {"documents": count, "tokens": num_tokens, "pool_documents": count // 4}
    for connector in ("none", "kvtier", "simple"):
        run = Engine(connector, model=model, max_tokens=num_tokens + 64, gpu_blocks=pool, host_gib=host_gib)
        first = run.serve(order, num_tokens, 8)
        again = run.serve(second, num_tokens, 8)
        run.close()
        expected = [first["tokens"][at] for at in second]
        figures[connector] = {
            "first_seconds": first["seconds"],
            "second_seconds": again["seconds"],
            "second_computed_percent": 100 * again["computed"] / (count * num_tokens),
            "is_same_output": again["tokens"] == expected,
            "connector_us_per_step": again["connector_us_per_step"],
        }
    return figures


def first_token(model: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Time to the first token of documents that fell out of the pool, which holds two."""
    count, num_tokens = (4, 512) if quick else (5, 3500)
    blocks = -(-num_tokens // BLOCK) + 1
    settings = {
        "model": model,
        "max_tokens": num_tokens + 64,
        "gpu_blocks": 2 * blocks + 4,
        "host_gib": (count + 2) * blocks * BLOCK * 4 * 2 * 4 * 32 * 4 / 2**30,
    }
    engines = {name: Engine(name, **settings) for name in ("none", "simple", "kvtier")}
    documents = list(range(100, 100 + count))
    times: dict[str, list[float]] = {name: [] for name in engines}
    per_step: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        for _ in range(2):  # the second also measures what loading costs
            run.serve(documents, num_tokens)
    for _ in range(rounds):
        for name, run in engines.items():
            answer = run.serve(documents, num_tokens)
            times[name].append(1e3 * statistics.median(answer["times"]))
            per_step[name].append(answer["connector_us_per_step"])
    for run in engines.values():
        run.close()
    ratios = {
        name: spread([own / other for own, other in zip(times["kvtier"], times[name], strict=True)])
        for name in ("none", "simple")
    }
    return {
        "tokens": num_tokens,
        "rounds": rounds,
        "ms": {name: spread(values) for name, values in times.items()},
        "kvtier_over": ratios,
        "connector_us_per_step": {name: spread(per_step[name]) for name in ("simple", "kvtier")},
    }


def no_benefit(model: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Prompts of which none comes twice: a job with the connector against the mean of one before and one after without.

    All run in one engine, which loses its connector for the jobs without: two engines of one kind differ by ten percent
    for as long as they live. What the jobs without differ by, the machine adds to any comparison. Processor time counts
    the copy thread, and not what other processes take. The share of the connector's calls in a job's time depends on
    no comparison, but leaves out what the copy thread takes from the others.
    """
    count, num_tokens, max_new = (4, 128, 8) if quick else (16, 512, 32)
    num_warm = 4
    blocks = -(-(num_tokens + max_new) // BLOCK) + 1
    run = Engine(
        "kvtier",
        model=model,
        max_tokens=num_tokens + 64,
        gpu_blocks=count * blocks + 8,
        # Full when the measured rounds begin, so that all of it has been touched and every store evicts.
        host_gib=(num_warm - 1) * count * (num_tokens // BLOCK) * BLOCK * 4 * 2 * 4 * 32 * 4 / 2**30,
    )
    next_seed = 1000
    jobs: list[dict[str, Any]] = []
    for turn in range(-num_warm, rounds):
        answers = {}
        for name in ("before", "kvtier", "after"):
            seeds = list(range(next_seed, next_seed + count))
            next_seed += count
            answers[name] = run.serve(seeds, num_tokens, max_new, together=True, has_connector=name == "kvtier")
        if turn >= 0:
            jobs.append(answers)
    run.close()
    assert all(set(job["before"]["connector_seconds"].values()) == {0.0} for job in jobs)
    assert all(min(job["kvtier"]["connector_seconds"].values()) > 0.0 for job in jobs)

    def ratios(measure: str) -> dict[str, dict[str, float]]:
        rows = [[job[name][measure] for name in ("before", "kvtier", "after")] for job in jobs]
        return {
            "none over none": quartiles([after / before for before, _, after in rows]),
            "kvtier over none": quartiles([2 * own / (before + after) for before, own, after in rows]),
        }

    shares = [100 * sum(job["kvtier"]["connector_seconds"].values()) / job["kvtier"]["seconds"] for job in jobs]
    return {
        "prompts": count,
        "tokens": num_tokens,
        "rounds": rounds,
        "ratios": {measure: ratios(measure) for measure in ("seconds", "cpu_seconds")},
        "connector_percent": quartiles(shares),
        "seconds": {name: [job[name]["seconds"] for job in jobs] for name in ("before", "kvtier", "after")},
    }


def scheduler_calls(model: str, rounds: int, quick: bool) -> dict[str, Any]:
    """What the connector asked its table for in a run, replayed on both systems; see scheduler_calls.py."""
    command = [sys.executable, str(HERE / "scheduler_calls.py"), model, str(rounds), *(["--quick"] if quick else [])]
    environment = environment_of_engines()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"scheduler_calls.py: exit status {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    documents, ttft, none = figures["long_documents"], figures["first_token"], figures["no_benefit"]
    calls = figures["scheduler_calls"]
    lines = [
        f"{documents['documents']} documents of {documents['tokens']} tokens, pool for {documents['pool_documents']}",
        f"  {'':8} {'first s':>8} {'second s':>9} {'computed':>9} {'same output':>12} {'connector us/step':>18}",
    ]
    for name in ("none", "kvtier", "simple"):
        row = documents[name]
        lines.append(
            f"  {name:8} {row['first_seconds']:8.2f} {row['second_seconds']:9.2f}"
            f" {row['second_computed_percent']:8.1f}% {row['is_same_output']!s:>12}"
            f" {row['connector_us_per_step']:18.1f}"
        )
    lines.append(f"first token of {ttft['tokens']} tokens, ms, min / median / max of {ttft['rounds']} rounds")
    for name, ms in ttft["ms"].items():
        lines.append(f"  {name:8} {ms['min']:8.2f} {ms['median']:8.2f} {ms['max']:8.2f}")
    for name, ratio in ttft["kvtier_over"].items():
        lines.append(f"  kvtier over {name}: {ratio['min']:.3f} / {ratio['median']:.3f} / {ratio['max']:.3f}")
    for name, us in ttft["connector_us_per_step"].items():
        lines.append(
            f"  scheduler's side of {name}: {us['min']:.0f} / {us['median']:.0f} / {us['max']:.0f} us per step"
        )
    lines.append(f"{none['prompts']} prompts of {none['tokens']} tokens, none twice, {none['rounds']} paired rounds,")
    lines.append("min / quartile / median / quartile / max")

    def five(of: dict[str, float]) -> str:
        return " / ".join(f"{of[at]:.3f}" for at in ("min", "lower_quartile", "median", "upper_quartile", "max"))

    for measure, by_name in none["ratios"].items():
        lines += [f"  {measure:12} {name:21} {five(ratio)}" for name, ratio in by_name.items()]
    lines.append(f"  percent of a job's time in the connector's calls: {five(none['connector_percent'])}")
    lines.append(
        f"the same calls, us per step, min / median / max of {calls['rounds']} replays of {calls['steps']} steps"
    )
    for name, us in calls["us_per_step"].items():
        blocks = calls["blocks"][name]
        lines.append(
            f"  {name:26} {us['min']:.1f} / {us['median']:.1f} / {us['max']:.1f}"
            f"   ({blocks['loaded']} blocks loaded, {blocks['stored']} stored)"
        )
    return "\n".join(lines)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (7)")
    parser.add_argument("--quick", action="store_true", help="small sizes, which measure nothing")
    parser.add_argument("--write", action="store_true", help="write benches/results/vllm-<date>.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as model:
        engine_module.make_model(model, 4096)
        figures = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "long_documents": long_documents(model, arguments.quick),
            "first_token": first_token(model, arguments.rounds, arguments.quick),
            "no_benefit": no_benefit(model, 3 * arguments.rounds, arguments.quick),
            "scheduler_calls": scheduler_calls(model, arguments.rounds, arguments.quick),
        }
    print(table(figures))
    if arguments.write:
        path = ROOT / "benches" / "results" / f"vllm-{datetime.date.today()}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
