"""Chart of the cost against the context length, from a benchmark's rows."""

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


def save_lengths(measurements: list[Measurement], path: Path, machine: str) -> None:
    """Draw the figure to ``path``; its suffix sets the format."""
    from efla.runs.vega import FORMATS, save

    kind = path.suffix.removeprefix(".")
    check_names("format of a figure", [kind], FORMATS)
    save(lengths_figure(measurements, path.stem, machine), path.parent, (kind,))
