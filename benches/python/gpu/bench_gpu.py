"""Speed of the CUDA extension: GB/s by path, direction, block size and count, and what copies cost a decode step.

Run: make gpu-bench, or python benches/python/gpu/bench_gpu.py [--json FILE] [--write] with any Python that has torch
and kvtier's wheel. `--write` puts the tables into docs/cuda.md. Beside kvtier's paths, of which `batch` is one call of
cuMemcpyBatchAsync, it measures torch's `copy_` block by block and, where vLLM is installed, its `swap_blocks`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests/gpu"))

from gpu_memory import TorchGpu, why_no_gpu
from kvtier.cuda import probe
from measures import (
    LOAD_PATHS,
    STORE_PATHS,
    Case,
    Measured,
    Transfer,
    measure_paths,
    put_between,
    render,
    scattered_pairs,
)

ROOT = Path(__file__).resolve().parents[3]
CASES = [
    Case(block_bytes, num_blocks, rounds=9)
    for block_bytes, many in ((4096, 4096), (32 << 10, 2048), (512 << 10, 256), (2 << 20, 64))
    for num_blocks in (16, many)
]
DECODE_STEPS, DECODE_LAYERS, DECODE_WIDTH = 30, 16, 8192


def timed(gpu: TorchGpu, rounds: int, body: Callable[[], None]) -> float:
    """Median seconds of work on the compute stream, after a round that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        gpu.torch.cuda.synchronize()
        start = time.perf_counter()
        with gpu.torch.cuda.stream(gpu.torch_stream):
            body()
        gpu.torch_stream.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure_others(gpu: TorchGpu, case: Case) -> Iterator[Measured]:
    """What else copies such blocks: torch, and vLLM where it is installed."""
    torch = gpu.torch
    num_ids = 2 * case.num_blocks
    on_gpu = torch.zeros(num_ids, case.block_bytes, dtype=torch.uint8, device=gpu.device)
    on_cpu = torch.zeros(num_ids, case.block_bytes, dtype=torch.uint8, pin_memory=True)
    pairs = scattered_pairs(0, case.num_blocks)
    rows = pairs.tolist()
    mapping = torch.from_numpy(pairs.astype("int64"))
    swap_blocks = find_swap_blocks(case.block_bytes)
    for direction, source, target in (("load", on_cpu, on_gpu), ("store", on_gpu, on_cpu)):

        def by_torch(source: Any = source, target: Any = target) -> None:
            for first, second in rows:
                target[second].copy_(source[first], non_blocking=True)

        def by_vllm(source: Any = source, target: Any = target) -> None:
            assert swap_blocks is not None
            swap_blocks(source, target, mapping)

        for name, body in (("torch copy_", by_torch), ("vLLM swap_blocks", by_vllm if swap_blocks else None)):
            if body is not None:
                rate = case.total_bytes / timed(gpu, case.rounds, body) / 1e9
                yield Measured(name, direction, case.block_bytes, case.num_blocks, rate)


def find_swap_blocks(block_bytes: int) -> Callable[[Any, Any, Any], None] | None:
    """vLLM's `swap_blocks` as (source, target, mapping); None where it is not installed."""
    try:
        from vllm._custom_ops import swap_blocks
    except ImportError:
        return None
    if len(inspect.signature(swap_blocks).parameters) == 3:  # older ones took the block's bytes from the tensor
        return swap_blocks
    return lambda source, target, mapping: swap_blocks(source, target, block_bytes, mapping)


def measure_slowdown(gpu: TorchGpu) -> Iterator[tuple[str, float]]:
    """Time of a stand-in for a decode step, which reads 2 GiB of weights, while copies run, against alone."""
    torch = gpu.torch
    weights = [
        torch.randn(DECODE_WIDTH, DECODE_WIDTH, dtype=torch.bfloat16, device=gpu.device) for _ in range(DECODE_LAYERS)
    ]
    states = torch.randn(16, DECODE_WIDTH, dtype=torch.bfloat16, device=gpu.device)

    def steps(meanwhile: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(DECODE_STEPS):
                meanwhile()
                for weight in weights:
                    torch.mm(states, weight)

        return run

    alone = timed(gpu, 5, steps(lambda: None))
    case = Case(2 << 20, 64, rounds=1)
    for load_path, store_path in zip(LOAD_PATHS, STORE_PATHS, strict=True):
        for directions in (("load",), ("store",), ("load", "store")):
            # On a stream of their own: the copies wait for no step, and no step for them.
            transfer = Transfer(OtherStream(gpu), case, load_path, store_path)
            open_now = dict.fromkeys(directions, 0)
            tickets: dict[int, str] = {}

            def keep_busy(
                transfer: Transfer = transfer, open_now: dict[str, int] = open_now, tickets: dict[int, str] = tickets
            ) -> None:
                for ticket, _ in transfer.engine.poll():
                    open_now[tickets.pop(ticket)] -= 1
                for direction, num_open in open_now.items():
                    if num_open == 0:
                        tickets[transfer.start(direction)] = direction
                        open_now[direction] += 1

            with transfer.engine:
                busy = timed(gpu, 5, steps(keep_busy))
                transfer.finish(len(tickets))
            paths = {"load": load_path, "store": store_path}
            yield " and ".join(f"{direction}s, {paths[direction]}" for direction in directions), busy / alone


class OtherStream:
    """The same device with another compute stream."""

    def __init__(self, gpu: TorchGpu) -> None:
        self._gpu = gpu
        self.index = gpu.index
        self._torch_stream = gpu.torch.cuda.Stream(gpu.device)
        self.stream = self._torch_stream.cuda_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)


def main() -> int:
    """Measures, prints, and writes what is asked for; 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/cuda.md")
    options = parser.parse_args()
    reason = why_no_gpu()
    if reason is not None:
        print(f"no GPU to measure with: {reason}", file=sys.stderr)
        return 1
    gpu = TorchGpu()
    found = probe(gpu.index)
    device = {"name": found.name, "driver": found.driver_version, "torch": gpu.torch.__version__}
    lines: list[Measured] = []
    for case in CASES:
        print(f"{case.num_blocks} blocks of {case.block_bytes} bytes", file=sys.stderr)
        lines += measure_paths(gpu, case)
        lines += measure_others(gpu, case)
    slowdowns = list(measure_slowdown(gpu))
    text = render(device, lines, slowdowns)
    print(text)
    if options.json is not None:
        figures = {"device": device, "rates": [dataclasses.asdict(line) for line in lines], "decode": slowdowns}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.write:
        page = ROOT / "docs/cuda.md"
        page.write_text(put_between(page.read_text(), "<!-- gpu-bench -->", "<!-- /gpu-bench -->", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
