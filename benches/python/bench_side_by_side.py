"""kvtier, its one-mutex variant, vLLM, Dynamo and SGLang side by side, in interleaved rounds of one process group.

Run: make bench, or
  python benches/python/bench_side_by_side.py [--rounds 9] [--rivals .venv-bench/bin/python] [--write]

Each system is a process that answers a line with the figures of one round (`run_*.py`, `benches/side_by_side.rs`,
`benches/concurrent.rs`); a round asks all of them, one after another. With `--write`, all figures go to
benches/results/<date>.json and the tables to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from render import document

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
ROUND_S = 120
"""Longest that a system may take for one answer; the first includes its imports."""


class System:
    """One process that answers rounds."""

    def __init__(self, name: str, command: list[str], says_ready: bool) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.rounds: list[dict[str, float]] = []
        self.why_not = ""
        if says_ready and self._answer() != "ready":
            self.why_not = self.why_not or "it did not start"

    def _answer(self) -> str:
        import select

        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ROUND_S)[0]:
            self.why_not = f"no answer within {ROUND_S} s"
            self.process.kill()
            return ""
        line = self.process.stdout.readline().strip()
        if not line:
            self.why_not = f"it ended with exit status {self.process.wait(ROUND_S)}"
        return line

    def round(self) -> None:
        """Asks for one round."""
        if self.why_not:
            return
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if answer := self._answer():
            self.rounds.append(json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(ROUND_S)

    def figures(self) -> dict[str, dict[str, float]]:
        """Minimum, median and maximum of the rounds."""
        names = self.rounds[0] if self.rounds else {}
        series = {name: [figures[name] for figures in self.rounds] for name in names}
        return {
            name: {
                "min": round(min(values), 3),
                "median": round(statistics.median(values), 3),
                "max": round(max(values), 3),
            }
            for name, values in series.items()
        }


def rust_bench(name: str) -> str:
    """Builds a bench; the path of its program."""
    command = ["cargo", "bench", "--locked", "--quiet", "--no-run", "--bench", name, "--message-format=json"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    programs = [json.loads(line).get("executable") for line in built.splitlines()]
    return next(program for program in programs if program)


def machine() -> str:
    """Model and number of the processors, without the machine's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'unknown processor'}, {len(os.sched_getaffinity(0))} cores"


def main() -> int:
    """Starts the systems, asks for the rounds, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rivals", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.rounds < 7:
        parser.error("at least 7 rounds")
    systems = [
        System("Rust", [rust_bench("side_by_side")], says_ready=False),
        System("threads", [rust_bench("concurrent")], says_ready=False),
        System("kvtier", [sys.executable, str(HERE / "run_kvtier.py")], says_ready=True),
    ]
    has_rivals = Path(options.rivals).exists()
    for rival in ("vllm", "dynamo", "sglang") if has_rivals else ():
        systems.append(System(rival, [options.rivals, str(HERE / f"run_{rival}.py")], says_ready=True))
    if not has_rivals:
        print("without rivals: `make bench-rivals` installs them", file=sys.stderr)
    for number in range(options.rounds):
        for system in systems:
            system.round()
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    for system in systems:
        system.close()
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "rounds": options.rounds,
        "unit": "microseconds",
        "systems": {system.name: system.figures() for system in systems},
        "failed": {system.name: system.why_not for system in systems if system.why_not},
    }
    text = document(result)
    print(text)
    if options.write:
        results = ROOT / "benches" / "results"
        results.mkdir(exist_ok=True)
        (results / f"{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
        (ROOT / "docs" / "benchmarks.md").write_text(text)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
