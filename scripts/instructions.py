#!/usr/bin/env python3
"""Counts the instructions of fixed work on the table by callgrind, and compares with benches/instructions.json.

Instruction counts hardly depend on what else the machine does, so a regression shows on any of them. They do depend on
the compiler: with another one than the file names, the check is skipped and says so; likewise without valgrind.

Run: scripts/instructions.py [--update]
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = ROOT / "benches" / "instructions.json"
ROUNDS = 8
SCENARIOS = ("hit_256", "hit_3", "miss_256", "miss_3", "store_side_256", "hit_side_256", "lookup_256")


def compiler() -> str:
    """Version and target of the compiler that would build the bench."""
    version = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return f"{version} {platform.machine()}"


def build() -> str:
    """Builds the bench; the path of its program."""
    command = ["cargo", "bench", "--locked", "--quiet", "--no-run", "--bench", "instructions", "--message-format=json"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    programs = [json.loads(line).get("executable") for line in built.splitlines()]
    return next(program for program in programs if program)


def count(program: str, scenario: str) -> int:
    """Instructions of one round of a scenario, on average."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--toggle-collect=*measured*"]
        run = subprocess.run([*command, program, scenario, str(ROUNDS)], capture_output=True, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"instructions: {scenario} failed under valgrind:\n{run.stderr[-2000:]}")
        totals = [line for line in out.read_text().splitlines() if line.startswith(("totals:", "summary:"))]
    num_instructions = int(totals[0].split()[1])
    if num_instructions == 0:
        sys.exit(f"instructions: callgrind counted nothing in {scenario}: is the function `measured` still there?")
    return num_instructions // ROUNDS


def main() -> int:
    """Counts, compares, and says what has changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the counts of now to benches/instructions.json")
    update = parser.parse_args().update
    if shutil.which("valgrind") is None:
        print("instructions: skipped, valgrind is not installed")
        return 0
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    if not update and expected.get("compiler") != compiler():
        print(f"instructions: skipped, counted with rustc {expected.get('compiler')}, here is rustc {compiler()}")
        return 0
    program = build()
    counts = {scenario: count(program, scenario) for scenario in SCENARIOS}
    if update:
        tolerance = expected.get("tolerance_percent", 3)
        document = {"compiler": compiler(), "tolerance_percent": tolerance, "instructions_per_round": counts}
        EXPECTED.write_text(json.dumps(document, indent=2) + "\n")
    else:
        tolerance = expected["tolerance_percent"]
    is_good = True
    for scenario, now in counts.items():
        before = now if update else expected["instructions_per_round"].get(scenario, 0)
        change = 100 * (now - before) / before if before else float("inf")
        is_good &= change <= tolerance
        verdict = "TOO MANY" if change > tolerance else "fewer: update the file" if change < -tolerance else ""
        print(f"instructions: {scenario:16} {now:9} ({change:+.2f} %) {verdict}".rstrip())
    if not is_good:
        print(f"instructions: more than {tolerance} % above benches/instructions.json; `--update` if it is worth it")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
