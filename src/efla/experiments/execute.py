"""Running one cell and stamping its rows with config, versions, threads, commit and wall time."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass

import torch

from efla.experiments.experiment import Cell, Experiment, Report
from efla.runs import provenance
from efla.runs.records import Record

VOLATILE = frozenset({"started", "wall_seconds", "timing"})
"""Fields of a row that differ between two runs of the same cell; everything else is reproduced."""


@dataclass(frozen=True)
class Event:
    """What happened to a cell: "started", "progress", "finished" (with rows) or "failed" (with a message)."""

    kind: str
    cell: Cell
    fraction: float = 0.0
    values: dict[str, float] | None = None
    rows: list[Record] | None = None
    message: str = ""


def execute(experiment: Experiment[object], cell: Cell, report: Report, threads: int) -> list[Record]:
    """Run one cell with the given number of threads; returns its rows, stamped."""
    torch.set_num_threads(threads)
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.perf_counter()
    rows = experiment.run_cell(cell, report)
    wall_seconds = round(time.perf_counter() - clock, 3)
    if not rows:
        raise RuntimeError(f"cell '{cell.id}' returned no rows")
    stamped = [{"row": row.get("row", "point"), "cell": cell.id, **cell.settings, **row} for row in rows]
    if any(row["row"] == "cell" for row in stamped[:-1]):
        raise RuntimeError(f"only the last row of cell '{cell.id}' may sum it up")
    stamped[-1] |= {
        "row": "cell",
        "rows": len(stamped),
        "experiment": experiment.name,
        "config": experiment.protocol(),
        "threads": threads,
        "versions": provenance.versions(),
        "commit": provenance.git_commit(),
        "machine": provenance.machine(),
        "started": started.isoformat(timespec="seconds"),
        "wall_seconds": stamped[-1].get("wall_seconds", wall_seconds),  # its own if it goes on after an interruption
    }
    return stamped


def stable(row: Record) -> Record:
    """A row without what differs between two runs of the same cell."""
    return {key: value for key, value in row.items() if key not in VOLATILE}
