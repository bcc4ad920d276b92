"""The command line: `kvtier demo`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Never

import kvtier
from kvtier.demo.workload import ORDERS, Workload
from kvtier.errors import ConfigError, KvtierError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEMO_NEEDS = ("torch", "transformers", "safetensors", "rich")
BAD_OPTION = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        """One line, as for every other bad option, and no usage text above it."""
        self.exit(BAD_OPTION, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: What follows the program's name; None: those of this process.

    Returns:
        The exit status: 0, 1 if the demo found a mismatch or a run failed, 2 for a bad option.
    """
    options = _parser().parse_args(arguments)
    try:
        return _demo(options)
    except ConfigError as error:
        return _fail(BAD_OPTION, f"error: {error}")
    except KvtierError as error:
        return _fail(1, f"failed: {error}")
    except KeyboardInterrupt:
        return _fail(130, "interrupted")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvtier", description="A second tier for the KV cache of LLM engines.")
    parser.add_argument("--version", action="version", version=f"kvtier {kvtier.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="ask about more documents than GPU memory holds, with and without a second tier",
        description="Asks about every document once, then about all of them again, in three modes on the same model: "
        "without reuse, with a GPU prefix cache, with two tiers. Prints what each mode computed, found and copied, and "
        "how long it took. Exit status: 0; 1 if the modes' answers differ or a block came back with other bytes than "
        "it left with; 2 for a bad option. TTFT is counted from the submission of a request.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Workload()
    for name, text in (
        ("documents", "number of documents"),
        ("document-tokens", "tokens of each document"),
        ("answer-tokens", "tokens of each answer"),
        ("gpu-documents", "documents that GPU memory holds, each with its answer"),
        ("cpu-documents", "documents that host memory holds, each with its answer"),
        ("in-flight", "requests that are asked at the same time"),
        ("seed", "seed of documents, order and random weights"),
    ):
        value = getattr(default, name.replace("-", "_"))
        demo.add_argument(f"--{name}", type=int, default=value, metavar="N", help=text)
    orders = "order of the second round: shuffled, as the first, or the two halves of the documents in turns"
    demo.add_argument("--order", choices=ORDERS, default=default.order, help=orders)
    demo.add_argument("--model", metavar="PATH", help="checkpoint folder (Llama, Qwen2, Qwen3); none: random weights")
    demo.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    demo.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file too")
    return parser


def _demo(options: argparse.Namespace) -> int:
    workload = Workload(
        documents=options.documents,
        document_tokens=options.document_tokens,
        answer_tokens=options.answer_tokens,
        gpu_documents=options.gpu_documents,
        cpu_documents=options.cpu_documents,
        order=options.order,
        in_flight=options.in_flight,
        seed=options.seed,
    )
    if options.json is not None:
        _check_writable(options.json)
    missing = [name for name in DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return _fail(BAD_OPTION, f"the demo needs {', '.join(missing)}: pip install 'kvtier[demo]'")
    leave_a_core_to_the_copies()
    from kvtier.demo.command import run_demo

    return run_demo(workload, options.model, options.device, options.json)


def leave_a_core_to_the_copies() -> None:
    """Settle how torch uses the processor, before it is imported; what the environment says already stays.

    One core less than there are, as a GPU's copies have engines of their own; at most 4, since more do not help the
    small model. Idle threads sleep: spinning, as they would, they slow everybody down when a core is wanted elsewhere.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(min(max(cores - 1, 1), 4)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _check_writable(path: Path) -> None:
    """Refuse a path now that could not be written after the run.

    Raises:
        ConfigError: It cannot be written.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("--json", path, "a file that can be written, in a folder that exists")


def _fail(status: int, message: str) -> int:
    print(f"kvtier: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
