"""The parts of a report section, and helpers that the experiments share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from efla.runs.bars import Bars
from efla.runs.chart import Chart, Point, Series
from efla.runs.records import Record
from efla.runs.statistics import Claim, Spread
from efla.runs.style import ARMS


@dataclass(frozen=True)
class Table:
    """A table; a ``wide`` one is folded at first."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wide: bool = False


@dataclass(frozen=True)
class Figure:
    """A row of charts that share a legend."""

    title: str
    note: str
    charts: Sequence[Chart | Bars]
    legend: Sequence[Series]


@dataclass(frozen=True)
class Section:
    """One experiment's part of the report."""

    key: str
    title: str
    source: str
    intro: str
    claims: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    settings: Sequence[tuple[str, str]] = ()
    data: Sequence[str] = ()
    budget: str = ""
    not_concluded: Sequence[str] = field(default=())


def points(
    x: Sequence[float], curve: Sequence[Spread], unit: float = 1.0, digits: int = 1, suffix: str = ""
) -> list[Point]:
    """Points of a curve over seeds with a band of ± one standard deviation."""
    found = []
    for at, value in zip(x, curve, strict=True):
        mean, std = unit * value.mean, unit * value.std if value.n > 1 else 0.0
        found.append(Point(float(at), mean, mean - std, mean + std, value.text(unit, digits) + suffix))
    return found


def arm_series(
    arm: str, x: Sequence[float] = (), curve: Sequence[Spread] = (), unit: float = 1.0, digits: int = 1
) -> Series:
    """The curve of an arm over seeds; without points, its entry in a legend."""
    line = ARMS[arm]
    return Series(arm, line.label, points(x, curve, unit, digits), line.dash, line.width)


def settings_table(cells: Sequence[Record]) -> list[tuple[str, str]]:
    """The config of the rows, their versions, threads and commits."""
    config = cells[0]["config"]
    lines = [(key.replace("_", " "), _show(value)) for key, value in config.items()]
    for key in ("versions", "threads", "commit", "machine"):
        values = sorted({_show(row.get(key)) for row in cells})
        lines.append((key, "; ".join(values)))
    return lines


def budget(cells: Sequence[Record]) -> str:
    """The cost of the rows: cells, hours and dates."""
    seconds = sum(float(row["wall_seconds"]) for row in cells)
    amount = (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.1f} s"
    )
    days = sorted({str(row["started"])[:10] for row in cells})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    threads = sorted({int(row["threads"]) for row in cells})
    each = "/".join(map(str, threads))
    return f"{len(cells)} cells, {amount} of wall-clock time in total at {each} thread(s) each, {when} (UTC)."


def _show(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "–" if value is None else str(value)  # noqa: RUF001
