"""Line charts with error bands as SVG: sharp at any size, coloured by the page's style sheet, readable by keyboard."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 12, 46
DASHES = {"-": "none", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}


@dataclass(frozen=True)
class Point:
    """A value with its band; ``text`` is shown on hover."""

    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Series:
    """A curve; ``key`` names its colour in the style sheet."""

    key: str
    label: str
    points: Sequence[Point]
    dash: str = "-"
    width: float = 2.0


@dataclass(frozen=True)
class Chart:
    """Axes and curves. ``log_x`` and ``log_y`` choose logarithmic axes; crosses mark diverged runs at the top edge."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_range: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] | None = None
    crosses: Sequence[tuple[str, float]] = field(default=())
    """(key of the colour, x)."""


class _Scale:
    """A map from values to pixels, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool) -> None:
        self.log, self.low, self.high = log, low, high
        a, b = (math.log10(low), math.log10(high)) if log else (low, high)
        self._a, self._per = a, (end - start) / ((b - a) or 1.0)
        self._start = start

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, self.low * 1e-3))
        return self._start + (value - self._a) * self._per

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def render(chart: Chart) -> str:
    """The chart as an SVG element. Curves are clipped to the axes; non-finite values leave a gap."""
    xs = sorted({point.x for series in chart.series for point in series.points})
    if not xs:
        return '<p class="empty">no values</p>'
    x = _Scale(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, _LEFT, WIDTH - _RIGHT, chart.log_x)
    y = _Scale(*chart.y_range, HEIGHT - _BOTTOM, _TOP, chart.log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" class="chart" '
        f'aria-label="{escape(_describe(chart))}" data-values="{escape(_values(chart, xs, x))}">'
    ]
    parts += _axes(chart, x, y)
    box = (
        _LEFT - 4,
        _TOP - 2,
        WIDTH - _LEFT - _RIGHT + 8,
        HEIGHT - _TOP - _BOTTOM + 4,
    )  # an inner svg clips to its box
    parts.append('<svg x="{0}" y="{1}" width="{2}" height="{3}" viewBox="{0} {1} {2} {3}">'.format(*box))
    parts += [_band(series, x, y) for series in chart.series]
    parts += [_line(series, x, y) for series in chart.series]
    parts.append("</svg>")
    parts += [_cross(key, x(at)) for key, at in chart.crosses]
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" x1="0" x2="0"/></svg>')
    return "".join(parts)


def swatch(series: Series) -> str:
    """A short piece of the curve for a legend."""
    return (
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><line x1="1" x2="33" y1="5" y2="5" '
        f'style="stroke:var(--c-{series.key})" stroke-width="{series.width}" stroke-dasharray="{DASHES[series.dash]}"/></svg>'
    )


def tidy(value: float) -> str:
    """A number in short form."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _axes(chart: Chart, x: _Scale, y: _Scale) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for tick in y.ticks():
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{at}" dy="0.35em" text-anchor="end">{tidy(tick)}</text>')
    for tick in chart.x_ticks if chart.x_ticks is not None else x.ticks():
        if x.low <= tick <= x.high:
            at = f"{x(tick):.1f}"
            parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>')
            parts.append(f'<text class="tick" x="{at}" y="{bottom + 17}" text-anchor="middle">{tidy(tick)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    parts.append(
        f'<text class="label" transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches of finite points."""
    found: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.y):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def _line(series: Series, x: _Scale, y: _Scale) -> str:
    style = f'style="stroke:var(--c-{series.key})"'
    parts = []
    for run in _runs(series.points):
        path = "L".join(f"{x(point.x):.1f} {y(point.y):.1f}" for point in run)
        dash = DASHES[series.dash]
        parts.append(
            f'<path class="line" {style} stroke-width="{series.width}" stroke-dasharray="{dash}" d="M{path}"/>'
        )
    if len(series.points) < 30:
        for run in _runs(series.points):
            parts += [
                f'<circle style="fill:var(--c-{series.key})" r="2.6" cx="{x(p.x):.1f}" cy="{y(p.y):.1f}"/>' for p in run
            ]
    return "".join(parts)


def _band(series: Series, x: _Scale, y: _Scale) -> str:
    parts = []
    for run in _runs(series.points):
        if all(math.isfinite(point.low) and math.isfinite(point.high) for point in run) and any(
            p.low < p.high for p in run
        ):
            upper = "L".join(f"{x(point.x):.1f} {y(point.high):.1f}" for point in run)
            lower = "L".join(f"{x(point.x):.1f} {y(point.low):.1f}" for point in reversed(run))
            parts.append(f'<path class="band" style="fill:var(--c-{series.key})" d="M{upper}L{lower}Z"/>')
    return "".join(parts)


def _cross(key: str, at: float) -> str:
    return f'<path class="line" style="stroke:var(--c-{key})" stroke-width="2.5" d="M{at - 5:.1f} {_TOP}l10 10m0 -10l-10 10"/>'


def _describe(chart: Chart) -> str:
    curves = ", ".join(series.label for series in chart.series)
    return f"{chart.title}: {chart.y_label} against {chart.x_label}, curves {curves}. Left and right arrow keys read the values."


def _values(chart: Chart, xs: Sequence[float], x: _Scale) -> str:
    """The values shown on hover: per x its pixel, its text and a line per series."""
    shown = []
    by_series = [{point.x: point for point in series.points} for series in chart.series]
    for value in xs:
        lines = [
            [series.key, series.label, points[value].text]
            for series, points in zip(chart.series, by_series, strict=True)
            if value in points
        ]
        shown.append([round(x(value), 1), f"{chart.x_label}: {tidy(value)}", lines])
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def _linear_ticks(low: float, high: float) -> list[float]:
    span = (high - low) or 1.0
    rough = span / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [m * 10.0**e for e in range(first - 1, last + 2) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    step = max(1, math.ceil((last - first) / 6))
    return [10.0**e for e in range(first, last + 1, step)]
