"""Charts of the cost against the context length and of its growth, from a benchmark's rows."""

import math
from collections import defaultdict
from pathlib import Path

from efla.errors import check_names
from efla.runs.chart import Chart, Figure, Point, Series
from efla.runs.timing import Measurement

# Contender -> the style and the name of its curve.
_CONTENDERS = {
    "native": ("efla", "efla, native"),
    "chunked": ("exact-flow-l2", "efla, chunked (torch)"),
    "transformers": ("delta", "transformers, chunked torch"),
    "softmax attention": ("attention", "causal softmax attention (SDPA)"),
}


def lengths_figure(measurements: list[Measurement], name: str, machine: str) -> Figure:
    """Milliseconds of a forward pass against T, one chart per head width."""
    curves: dict[int, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for m in measurements:
        if m.work.startswith("length, forward ") and m.contender in _CONTENDERS:
            _, length, _, width = m.work.removeprefix("length, forward ").split()
            curves[int(width[1:])][m.contender].append((int(length[1:]), m.median * 1e3))
    charts = []
    every = [ms for found in curves.values() for points in found.values() for _, ms in points]
    for heads, found in sorted(curves.items()):
        series = []
        for contender, points in found.items():
            drawn = [Point(tokens, ms, text=f"{ms:.3g} ms") for tokens, ms in sorted(points)]
            series.append(Series(*_CONTENDERS[contender], drawn))
        ticks = sorted({float(point.x) for one in series for point in one.points})[::2]
        ends = (0.8 * min(every), 1.25 * max(every))
        title = f"8 heads of width {heads}"
        charts.append(Chart(title, "tokens", "forward pass, ms", series, ends, log_x=True, log_y=True, x_ticks=ticks))
    return Figure(name, f"Cost against length ({machine}, float32)", "", charts)


_AXES = {"tokens": "exact-flow", "sequences": "delta-l2", "heads": "gated-exact-flow"}
"""What grows -> the style of its curve."""


def growth_figure(measurements: list[Measurement], name: str, machine: str) -> Figure:
    """Time and memory for each token and head, of the suite growth: a flat curve grows in proportion."""
    charts = []
    for work in ("forward", "forward+backward"):
        for label, unit, value in (("ns", 1e9, lambda m: m.median), ("bytes", 1, lambda m: m.memory)):
            series = []
            for axis, style in _AXES.items():
                found = [m for m in measurements if m.work == f"growth of {axis}, {work}" and value(m) is not None]
                counted = [(math.prod(int(part[1:]) for part in m.contender.split()[:3]), value(m)) for m in found]
                points = [Point(n, unit * x / n, text=f"{unit * x / n:.4g} {label}") for n, x in counted]
                series.append(Series(style, f"more {axis}", points))
            title = f"{work}, {'time' if label == 'ns' else 'memory'}"
            most = max((point.y for one in series for point in one.points), default=1)
            y_label = f"{label} per token and head"
            charts.append(
                Chart(title, "tokens \N{MULTIPLICATION SIGN} heads", y_label, series, (0, 1.2 * most), log_x=True)
            )
    return Figure(name, f"Cost of a token as the work grows ({machine}, heads of 64, float32)", "", charts)


def save_lengths(measurements: list[Measurement], path: Path, machine: str) -> None:
    """Draw the figure to ``path``; its suffix sets the format."""
    from efla.runs.vega import FORMATS, save

    kind = path.suffix.removeprefix(".")
    check_names("format of a figure", [kind], FORMATS)
    save(lengths_figure(measurements, path.stem, machine), path.parent, (kind,))
