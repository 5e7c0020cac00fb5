"""What a chart shows, as data: axes, series over seeds, figures. :mod:`efla.runs.vega` draws them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from efla.runs.names import name_of
from efla.runs.statistics import Curve, Spread

FEW = 30
"""Curves with fewer points than this mark each of them, and their tables list all of them."""


@dataclass(frozen=True)
class Point:
    """A value with its band; ``x`` is the name of the group in a bar chart. ``seeds`` are drawn as dots."""

    x: float | str
    y: float
    low: float = math.nan
    high: float = math.nan
    text: str = ""
    seeds: Sequence[float] = ()


@dataclass(frozen=True)
class Series:
    """A curve, or the bars of one colour; ``key`` names the style."""

    key: str
    label: str
    points: Sequence[Point] = ()


class Guide(NamedTuple):
    """A straight line across a chart; its meaning is printed below the title, where no curve crosses it."""

    axis: Literal["x", "y"]
    at: float
    text: str = ""


@dataclass(frozen=True)
class Chart:
    """Axes, and curves over numbers, or bars or dots (one per seed, a line at their mean) over named groups.

    Crosses at the upper edge mark diverged runs: (key of the series, x).
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_range: tuple[float, float] | None = None
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] | None = None
    kind: Literal["curves", "bars", "dots"] = "curves"
    crosses: Sequence[tuple[str, float]] = ()
    guides: Sequence[Guide] = ()

    @property
    def shown(self) -> list[Series]:
        """The series that were run, finite or not."""
        return [one for one in self.series if one.points]

    @property
    def remarks(self) -> list[str]:
        """What the guides mean, and the series of which nothing can be drawn."""
        gone = [one.label for one in self.shown if not any(math.isfinite(p.y) or p.seeds for p in one.points)]
        return [
            *filter(None, (guide.text for guide in self.guides)),
            *([f"diverged: {', '.join(gone)}"] if gone else ()),
        ]


@dataclass(frozen=True)
class Figure:
    """Charts that share a legend. ``name`` is that of its files."""

    name: str
    title: str
    note: str
    charts: Sequence[Chart]

    @property
    def legend(self) -> list[Series]:
        """Each series of the charts once."""
        return list({one.label: one for chart in self.charts for one in chart.shown}.values())


def over_seeds(
    key: str, curve: Curve, unit: float = 1.0, digits: int = 1, *, dots: bool = False, diverged: int = 0
) -> Series:
    """A series over seeds with a band of ± one standard deviation, within 0 and 100 where the unit is percent.

    diverged: how many of its runs diverged. The label says so, and seeds are drawn instead of the band, which would hide it.
    """
    points = [seed_point(x, value, unit, digits, dots=dots) for x, value in zip(*curve, strict=True)]
    if not diverged:
        return Series(key, name_of(key), points)
    runs = max((value.n for value in curve[1]), default=diverged)
    points = [replace(point, low=math.nan, high=math.nan) for point in points]
    return Series(key, f"{name_of(key)}, {diverged} of {runs} runs diverged", points)


def seed_point(x: float | str, value: Spread, unit: float = 1.0, digits: int = 1, *, dots: bool = False) -> Point:
    """A mean over seeds with a band of ± one standard deviation, or of no width for one seed."""
    mean, std = unit * value.mean, unit * value.std if value.n > 1 else 0.0
    low, high = (min(100.0, max(0.0, end)) if unit == 100 else end for end in (mean - std, mean + std))
    seeds = [unit * one for one in value.values if math.isfinite(one)] if dots and value.n > 1 else ()
    return Point(x, mean, low, high, value.text(unit, digits), seeds)


def tidy(value: float) -> str:
    """A number in short form."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def values_table(chart: Chart) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a table with the values of a chart; long curves are thinned."""
    texts = {one.label: {point.x: point.text or tidy(point.y) for point in one.points} for one in chart.series}
    xs: list[Any] = list(dict.fromkeys(point.x for one in chart.series for point in one.points))
    if chart.kind == "curves":
        xs.sort()
    xs = [x for i, x in enumerate(xs) if i % (1 + len(xs) // FEW) == 0 or i == len(xs) - 1]
    rows = [[x if isinstance(x, str) else tidy(x), *(each.get(x, "") for each in texts.values())] for x in xs]
    return [chart.x_label, *texts], rows


def describe(chart: Chart) -> str:
    """The chart in a sentence, for screen readers."""
    names = ", ".join(one.label for one in chart.shown)
    return (
        f"{chart.title}: {chart.y_label} against {chart.x_label}, {chart.kind} {names}. The table below has the values."
    )
