"""Two evaluated models item by item: every column's difference with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from efla.evaluation.columns import ACCURACIES, COLUMNS, EXTRA_COLUMNS, Column
from efla.evaluation.items import Difference, Items, metric_items, paired_difference, paired_mean_difference, read_items
from efla.evaluation.run import items_path
from efla.runs.records import Record

MEAN = Column("mean", "mean of the 9", "mean", "acc")


def compare(
    rows: Sequence[Record], output: Path, a: str, b: str, *, times: int = 10_000
) -> list[tuple[Column, Difference]]:
    """B minus A for each column that both have, and for the mean of the nine accuracies where both have all nine.

    Differences are in the table's units: points of percent for accuracies.
    """
    tasks = {(str(row["model"]), str(row["task"])) for row in rows if row.get("row") == "cell"}
    found: list[tuple[Column, Difference]] = []
    accuracies: list[tuple[Items, Items]] = []
    for column in (*COLUMNS, *EXTRA_COLUMNS):
        if not {(a, column.task), (b, column.task)} <= tasks:
            continue
        pair = _items(output, a, b, column)
        found.append((column, _scaled(paired_difference(*pair, times=times), column.unit)))
        if column.is_accuracy:
            accuracies.append(pair)
    if len(accuracies) == len(ACCURACIES):
        found.append((MEAN, _scaled(paired_mean_difference(accuracies, times=times), MEAN.unit)))
    if not found:
        raise ValueError(
            f"{a!r} and {b!r} have no task of the paper in common in {output}; evaluate both on the same tasks"
        )
    return found


def _items(output: Path, a: str, b: str, column: Column) -> tuple[Items, Items]:
    files = [items_path(output, model, column.task) for model in (a, b)]
    first, second = (read_items(file) for file in files)
    if [_identity(r) for r in first] != [_identity(r) for r in second]:
        raise ValueError(
            f"{files[0]} and {files[1]} are about different items, so they cannot be paired; evaluate both models again "
            "on the same data"
        )
    return metric_items(first, column.metric), metric_items(second, column.metric)


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["doc_id"], record.get("doc_hash"), record.get("words"), record.get("bytes")


def _scaled(found: Difference, unit: float) -> Difference:
    return replace(found, a=unit * found.a, b=unit * found.b, low=unit * found.low, high=unit * found.high)


def comparison_lines(a: str, b: str, found: Sequence[tuple[Column, Difference]]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the comparison, as text."""
    headings = ["", "items", f"A: {a}", f"B: {b}", "B - A", "95 % interval", "p", "verdict"]
    return headings, [_line(column, difference) for column, difference in found]


def _line(column: Column, d: Difference) -> list[str]:
    digits = 3 if "bits" in column.metric else 2
    if not all(map(math.isfinite, (d.a, d.b, d.low, d.high))):
        return [column.title, str(d.num_items), f"{d.a:.4g}", f"{d.b:.4g}", "", "", "", "not finite"]
    shown = [f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}" for value in (d.a, d.b)]
    gaps = [f"{v:+.{digits}f}" if abs(v) < 1e6 else f"{v:+.3g}" for v in (d.value, d.low, d.high)]
    verdict = "no clear difference"
    if d.is_clear:
        verdict = "B better" if (d.value < 0) == column.lower_is_better else "A better"
    p = "< 0.001" if d.p_value < 0.001 else f"{d.p_value:.3f}"
    return [column.title, f"{d.num_items:,}", *shown, gaps[0], f"{gaps[1]} to {gaps[2]}", p, verdict]
