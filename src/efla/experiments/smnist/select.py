"""Picking numbers out of rows: curves over levels, rates and steps, per arm with spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from efla.experiments.smnist.config import ARMS
from efla.runs.records import Record, number
from efla.runs.statistics import Spread, level_mean, spread


class Setting(NamedTuple):
    """A block and a rate: what is held equal when arms are compared."""

    block: str
    rate: float


def runs(rows: Sequence[Record]) -> list[Record]:
    """The rows that sum up a training run."""
    return [row for row in rows if row.get("row") == "cell" and "arm" in row]


def arms_of(rows: Sequence[Record]) -> list[str]:
    """Arms in the rows, in the order of the config."""
    found = {row["arm"] for row in rows if "arm" in row}
    return [arm for arm in ARMS if arm in found]


def settings_of(rows: Sequence[Record]) -> list[Setting]:
    """Settings that were tested on corrupted images: bare first, larger rates first."""
    found = {Setting(row["block"], row["rate"]) for row in rows if row.get("row") == "level"}
    return sorted(found, key=lambda s: (s.block != "bare", s.block, -s.rate))


def level_curve(
    rows: Sequence[Record], setting: Setting, arm: str, kind: str, field: str = "accuracy"
) -> tuple[list[float], list[Spread]]:
    """A number against the level of a corruption: (levels, spread over seeds at each)."""
    found: dict[float, list[float]] = {}
    for row in _levels(rows, setting, arm, kind):
        found.setdefault(float(row["level"]), []).append(number(row[field]))
    levels = sorted(found)
    return levels, [spread(found[level]) for level in levels]


def kind_mean(rows: Sequence[Record], setting: Setting, arm: str, kind: str) -> Spread:
    """One number per arm and kind: the mean accuracy over levels (trapezoid on the index), spread over seeds."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for row in _levels(rows, setting, arm, kind):
        by_seed.setdefault(row["seed"], []).append((float(row["level"]), number(row["accuracy"])))
    return spread(level_mean([accuracy for _, accuracy in sorted(points)]) for points in by_seed.values())


def run_spread(rows: Sequence[Record], setting: Setting, arm: str, field: str) -> Spread:
    """A number of the runs of an arm, spread over seeds."""
    chosen = [row for row in runs(rows) if (row["block"], row["rate"], row["arm"]) == (*setting, arm)]
    return spread(number(row[field]) for row in chosen)


def rates_of(rows: Sequence[Record], block: str = "bare") -> list[float]:
    """Rates at which a block was trained, ascending."""
    return sorted({row["rate"] for row in runs(rows) if row["block"] == block})


def loss_curve(rows: Sequence[Record], setting: Setting, arm: str, window: int = 20) -> tuple[list[int], list[Spread]]:
    """Training loss against the step, smoothed with a trailing window, spread over the seeds that got that far."""
    curves = []
    for row in runs(rows):
        if (row["block"], row["rate"], row["arm"]) == (*setting, arm):
            losses = [number(loss) for loss in row["losses"]]
            curves.append(
                [
                    sum(losses[max(0, i + 1 - window) : i + 1]) / len(losses[max(0, i + 1 - window) : i + 1])
                    for i in range(len(losses))
                ]
            )
    length = min(map(len, curves), default=0)
    steps = sorted({*range(0, length, max(1, length // 100)), length - 1} - {-1})
    return [step + 1 for step in steps], [spread(curve[step] for curve in curves) for step in steps]


def _levels(rows: Sequence[Record], setting: Setting, arm: str, kind: str) -> list[Record]:
    return [
        row
        for row in rows
        if row.get("row") == "level"
        and row["kind"] == kind
        and (row["block"], row["rate"], row["arm"]) == (*setting, arm)
    ]
