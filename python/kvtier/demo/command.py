"""What `kvtier demo` does, from options to exit status."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.demo.modes import MODES, check_room, demo_model, run_modes, warm_up
from kvtier.demo.report import NAMES, Report, make_console
from kvtier.engine import make_copier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.demo.workload import Workload
    from kvtier.engine import Copier, KvMemory


def run_demo(
    workload: Workload,
    model_path: str | None,
    device: str,
    json_path: Path | None,
    copier_factory: Callable[[KvMemory, int], Copier] = make_copier,
) -> int:
    """Run all three modes, show the figures, and write them to `json_path` if given.

    Returns:
        The exit status: 0 if all modes gave the same tokens and every block came back as it left, otherwise 1.

    Raises:
        ConfigError: An option is outside its limits.
    """
    # its warnings and bars are about the loading of weights, and what matters of that is raised
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    model = demo_model(model_path, device, workload.seed)
    check_room(workload, model)
    warm_up(workload, model)
    columns = TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # refreshed between requests only: a thread that draws would take its share of what is measured
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        bars = [progress.add_task(NAMES[mode], total=2 * workload.documents) for mode in MODES]

        def advance(place: int) -> None:
            progress.advance(bars[place])
            progress.refresh()

        results = run_modes(workload, model, copier_factory=copier_factory, on_request=advance)
    report = Report(workload, dict(zip(MODES, results, strict=True)))
    report.print(make_console())
    if json_path:
        report.write_json(json_path)
    return 0 if report.outputs_identical and report.bytes_identical else 1
