"""Run the cells of an experiment that an output folder does not have yet."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from efla.errors import check_names
from efla.experiments.executors import run_in_processes, run_inline, run_on_ray
from efla.experiments.experiment import Cell, Event, Experiment
from efla.runs.folder import RunFolder
from efla.runs.progress import GridProgress, clock, format_values

EXECUTORS = {"inline": run_inline, "process": run_in_processes, "ray": run_on_ray}


@dataclass(frozen=True)
class RunSummary:
    """How many cells ran, how many were finished before, and how many damaged lines were set aside."""

    ran: int
    skipped: int
    repaired: int


def run(
    experiment: Experiment[Any],
    output: Path,
    *,
    executor: str = "process",
    workers: int = 1,
    threads: int = 1,
    console: Console | None = None,
) -> RunSummary:
    """Run every cell of the grid that ``output`` does not have. Each cell is saved when it finishes.

    A cell that fails does not stop the others; all failures are raised as one error at the end. Ctrl-C stops the workers
    and loses only the cells in progress; the same command resumes.
    """
    check_names("executor", [executor], EXECUTORS)
    if workers < 1 or threads < 1:
        raise ValueError(f"workers and threads must be at least 1, got {workers} and {threads}")
    if executor == "inline":
        workers = 1
    console = console or Console(stderr=True)
    experiment = experiment.with_output(output)
    cells = experiment.cells()
    if not cells:
        raise ValueError("the grid has no cells; give at least one arm, rate and seed")
    name, count = Counter(cell.id for cell in cells).most_common(1)[0]
    if count > 1:
        raise ValueError(f"cell '{name}' is in the grid {count} times")
    experiment.prepare()
    with RunFolder.open(output, experiment.folder_name(), experiment.protocol()) as folder:
        if folder.repaired:
            lines = f"{folder.repaired} half-written lines were set aside in {output}; their cells run again"
            console.print(lines, markup=False)
        finished = folder.finished()
        to_do = [cell for cell in cells if cell.id not in finished]
        skipped = len(cells) - len(to_do)
        for cell in cells:
            if cell.id in finished:
                experiment.clean_up(cell)
        if skipped:
            console.print(f"{skipped} of {len(cells)} cells are in {output} already", markup=False)
        expected = _expected(experiment, to_do, workers, threads, console)
        failures: list[Event] = []
        with GridProgress(console, len(cells), already=skipped, workers=workers, expected=expected) as grid:

            def emit(event: Event) -> None:
                if event.kind == "started":
                    grid.start(event.cell.label)
                elif event.kind == "progress":
                    grid.progress(event.cell.label, event.fraction, event.values)
                elif event.kind == "finished":
                    folder.append(event.rows)
                    experiment.clean_up(event.cell)
                    grid.finish(event.cell.label, format_values(event.rows[-1].get("show", {})))
                else:
                    failures.append(event)
                    grid.fail(event.cell.label, event.message)

            try:
                if to_do:
                    EXECUTORS[executor](experiment, to_do, workers, threads, emit)
            except KeyboardInterrupt:
                done = len(folder.finished() & {cell.id for cell in cells})
                console.print(
                    f"stopped: {done} of {len(cells)} cells are finished and safe; the same command continues"
                )
                raise
        summary = RunSummary(len(to_do) - len(failures), skipped, folder.repaired)
    if failures:
        first = failures[0]
        raise RuntimeError(
            f"{len(failures)} of {len(to_do)} cells failed; the others are safe in {output}. "
            f"The first was '{first.cell.label}':\n{first.message.strip()}"
        )
    return summary


def _expected(
    experiment: Experiment[Any], cells: Sequence[Cell], workers: int, threads: int, console: Console
) -> dict[str, float] | None:
    """Seconds per cell by label, if there are cells and the experiment can estimate them; prints the total."""
    seconds = experiment.expected_seconds(cells, threads) if cells else None
    if seconds is None:
        return None
    workers = min(workers, len(cells))
    total = max(max(seconds), sum(seconds) / workers)
    console.print(
        f"{len(cells)} cells to run, {workers} at a time with {threads} thread(s) each: at most about {clock(total)} "
        "at this machine's present speed",
        soft_wrap=True,
    )
    return {cell.label: value for cell, value in zip(cells, seconds, strict=True)}
