"""The demo's figures as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvtier.demo.modes import ModeResult
    from kvtier.demo.workload import Workload

NAMES = {"none": "no reuse", "gpu": "GPU only", "two_tier": "two tiers"}
WIDTH = 110


@dataclass(frozen=True)
class Report:
    """All modes of one run.

    Attributes:
        workload: What was asked.
        modes: Results by mode: `"none"`, `"gpu"`, `"two_tier"`.
    """

    workload: Workload
    modes: dict[str, ModeResult]

    @property
    def outputs_identical(self) -> bool:
        """Whether all modes gave the same answers."""
        answers = [result.answers for result in self.modes.values()]
        return all(other == answers[0] for other in answers)

    @property
    def bytes_identical(self) -> bool:
        """Whether every block that came back had the bytes it left with."""
        return not any(result.num_different for result in self.modes.values())

    def write_json(self, path: Path) -> None:
        """Write the figures to a file."""
        fields = {
            "capacity_docs": {"gpu": self.workload.gpu_documents, "cpu": self.workload.cpu_documents},
            "modes": {
                mode: {name: asdict(figures) for name, figures in result.rounds.items()}
                for mode, result in self.modes.items()
            },
            "outputs_identical": self.outputs_identical,
            "bytes_identical": self.bytes_identical,
        }
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print the table and what follows from it."""
        work = self.workload
        console.print(
            f"{work.documents} documents of {work.document_tokens} tokens, answers of {work.answer_tokens}; "
            f"{work.in_flight} in flight; second round in {work.order} order\n"
            f"capacity in documents: GPU {work.gpu_documents}, host {work.cpu_documents}",
            highlight=False,
        )
        console.print(self._table())
        gpu, two = self.modes["gpu"].rounds, self.modes["two_tier"].rounds
        share = 100 * two["second"].computed_tokens / two["second"].prompt_tokens
        compared, different = self.modes["two_tier"].num_compared, self.modes["two_tier"].num_different
        extra = 100 * (two["first"].seconds / gpu["first"].seconds - 1)
        console.print(
            f"second round: two tiers computed {share:.1f} % of the prompt tokens and took "
            f"{two['second'].seconds / gpu['second'].seconds:.2f} of GPU-only's time\n"
            f"first round, where nothing can be reused: two tiers took {extra:+.1f} % time\n"
            f"tokens identical in all three modes: {_verdict(self.outputs_identical)}\n"
            f"blocks that came back with the bytes they left with: {_verdict(self.bytes_identical)} "
            f"({compared - different} of {compared})",
            highlight=False,
        )

    def _table(self) -> Table:
        table = Table()
        for heading in ("mode", "round"):
            table.add_column(heading, no_wrap=True)
        for heading in (
            "prompt\ntokens",
            "computed\ntokens",
            "GPU hit\ntokens",
            "host hit\ntokens",
            "loaded\nblocks",
            "stored\nblocks",
            "TTFT\nmean ms",
            "TTFT\np99 ms",
            "\nseconds",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for mode, result in self.modes.items():
            for name, figures in result.rounds.items():
                table.add_row(
                    NAMES[mode],
                    name,
                    str(figures.prompt_tokens),
                    str(figures.computed_tokens),
                    str(figures.gpu_hit_tokens),
                    str(figures.cpu_hit_tokens),
                    str(figures.loaded_blocks),
                    str(figures.stored_blocks),
                    f"{figures.ttft_mean_s * 1e3:.1f}",
                    f"{figures.ttft_p99_s * 1e3:.1f}",
                    f"{figures.seconds:.2f}",
                    end_section=name == "second",
                )
        return table


def make_console() -> Console:
    """A console on standard output that is wide enough for the table wherever it goes."""
    console = Console()
    return console if console.is_terminal and console.width >= WIDTH else Console(width=WIDTH)


def _verdict(holds: bool) -> str:
    return "yes" if holds else "NO"
