"""Bar charts with error bars as SVG, readable by mouse and keyboard like the line charts."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from efla.runs.chart import HEIGHT, WIDTH, Chart, Point, render, tidy

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 22, 46
_NUMBERED = 8
"""Charts with at most this many bars show their numbers."""


@dataclass(frozen=True)
class BarSeries:
    """One bar per group, or ``None``; ``key`` names the colour in the style sheet."""

    key: str
    label: str
    points: Sequence[Point | None]


@dataclass(frozen=True)
class Bars:
    """Groups of bars side by side, from 0 to ``top``."""

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str]
    series: Sequence[BarSeries]
    top: float = 100.0


def draw(chart: Chart | Bars) -> str:
    """A chart of either kind as an SVG element."""
    return _bars(chart) if isinstance(chart, Bars) else render(chart)


def _bars(chart: Bars) -> str:
    shown = [series for series in chart.series if any(_finite(point) for point in series.points)]
    if not chart.groups or not shown:
        return '<p class="empty">no values</p>'
    bottom = HEIGHT - _BOTTOM
    group_width = (WIDTH - _LEFT - _RIGHT) / len(chart.groups)
    width = 0.8 * group_width / len(shown)
    centres = [_LEFT + (i + 0.5) * group_width for i in range(len(chart.groups))]

    def y(value: float) -> float:
        return bottom - max(0.0, min(value, chart.top)) / chart.top * (bottom - _TOP)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" class="chart" '
        f'aria-label="{escape(_describe(chart))}" data-values="{escape(_values(chart, shown, centres))}">'
    ]
    for tick in range(5):
        value = chart.top * tick / 4
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{at}" dy="0.35em" text-anchor="end">{tidy(value)}</text>')
    numbered = len(shown) * len(chart.groups) <= _NUMBERED
    for j, series in enumerate(shown):
        for centre, point in zip(centres, series.points, strict=True):
            if point is not None and _finite(point):
                left = centre + (j - len(shown) / 2) * width
                parts += _bar(series.key, left, 0.92 * width, point, y, bottom, numbered)
    parts += _labels(chart, centres, bottom)
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{bottom}" x1="0" x2="0"/></svg>')
    return "".join(parts)


def _bar(
    key: str, left: float, width: float, point: Point, y: Callable[[float], float], bottom: float, numbered: bool
) -> list[str]:
    top, middle = y(point.y), left + width / 2
    parts = [
        f'<rect style="fill:var(--c-{key})" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
    ]
    highest = top
    if point.low < point.high:
        low, high = y(point.low), y(point.high)
        highest = high
        arm = min(4.0, width / 3)
        parts.append(
            f'<path class="axis" d="M{middle:.1f} {low:.1f}V{high:.1f}M{middle - arm:.1f} {high:.1f}h{2 * arm:.1f}'
            f'M{middle - arm:.1f} {low:.1f}h{2 * arm:.1f}"/>'
        )
    if numbered:
        parts.append(
            f'<text class="tick" x="{middle:.1f}" y="{highest - 5:.1f}" text-anchor="middle">{point.y:.1f}</text>'
        )
    return parts


def _labels(chart: Bars, centres: Sequence[float], bottom: float) -> list[str]:
    parts = [f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}"/>']
    crowded = len(chart.groups) > 4
    for centre, name in zip(centres, chart.groups, strict=True):
        if crowded:
            parts.append(
                f'<text class="tick" transform="translate({centre + 3:.1f} {bottom + 8}) rotate(-40)" text-anchor="end">'
                f"{escape(name)}</text>"
            )
        else:
            parts.append(
                f'<text class="tick" x="{centre:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(name)}</text>'
            )
    if not crowded:
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
        )
    parts.append(
        f'<text class="label" transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _finite(point: Point | None) -> bool:
    return point is not None and math.isfinite(point.y)


def _describe(chart: Bars) -> str:
    bars = ", ".join(series.label for series in chart.series)
    return f"{chart.title}: {chart.y_label} by {chart.x_label}, bars {bars}. Left and right arrow keys read the values."


def _values(chart: Bars, shown: Sequence[BarSeries], centres: Sequence[float]) -> str:
    """The values shown on hover: per group its pixel, its name and a line per bar."""
    found = []
    for i, (centre, name) in enumerate(zip(centres, chart.groups, strict=True)):
        lines = [[series.key, series.label, point.text] for series in shown if (point := series.points[i]) is not None]
        found.append([round(centre, 1), f"{chart.x_label}: {name}", lines])
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))
