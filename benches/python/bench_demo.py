"""Measures the demo's promises: what two tiers cost in the first round and save in the second.

Both modes take turns after every document, as in the demo itself, and each document gives one ratio of times (wall
clock, from submission until the answer and the stores that it caused are done). What counts is the median of the
ratios. Bytes are not compared, so that nothing but the engine runs. Exit status 1 if a median is above its limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from kvtier.cli import leave_a_core_to_the_copies

LIMITS = {"first": 1.03, "second": 1 / 3}
COMPUTED_LIMIT = 0.03


def main() -> int:
    """Ask all documents of all passes and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=5, help="how often the workload is run (default 5)")
    parser.add_argument("--documents", type=int, default=40, help="documents of the workload (default 40)")
    parser.add_argument("--null", action="store_true", help="compare the GPU prefix cache with itself: the noise")
    options = parser.parse_args()
    leave_a_core_to_the_copies()
    from kvtier.demo.modes import demo_model, run_modes, warm_up
    from kvtier.demo.workload import Workload

    workload = Workload(documents=options.documents, cpu_documents=options.documents)
    model = demo_model(None, "cpu", workload.seed)
    warm_up(workload, model)
    modes = ("gpu", "gpu" if options.null else "two_tier")
    ratios: dict[str, list[float]] = {"first": [], "second": []}
    share = 0.0
    for number in range(options.passes):
        gpu, other = run_modes(workload, model, modes, verify=False)
        for name, values in ratios.items():
            pairs = zip(gpu.turn_seconds[name], other.turn_seconds[name], strict=True)
            values += [theirs / ours for ours, theirs in pairs]
            seconds = [
                f"{mode} {result.rounds[name].seconds:.2f} s" for mode, result in zip(modes, (gpu, other), strict=True)
            ]
            print(f"pass {number + 1}, {name} round: {', '.join(seconds)}", flush=True)
        share = other.rounds["second"].computed_tokens / other.rounds["second"].prompt_tokens
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    for name, values in ratios.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(f"{name} round: median ratio {medians[name]:.4f} of {len(values)} (quartiles {low:.4f}, {high:.4f})")
    print(f"second round: {100 * share:.1f} % of the prompt tokens computed")
    if options.null:
        return 0
    return int(any(medians[name] > limit for name, limit in LIMITS.items()) or share > COMPUTED_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
