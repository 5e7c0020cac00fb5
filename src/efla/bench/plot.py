"""Chart of the cost against the context length, from a benchmark's rows."""

from collections import defaultdict
from pathlib import Path

from efla.runs.timing import Measurement

_STYLE = {
    "native": ("#0b6e4f", "efla native"),
    "chunked": ("#6a994e", "efla chunked (torch)"),
    "transformers": ("#bc4749", "transformers, chunked torch"),
    "softmax attention": ("#52528c", "causal softmax attention (SDPA)"),
}


def plot_lengths(measurements: list[Measurement], path: Path, machine: str) -> None:
    """Plot milliseconds of a forward pass against T, one panel per head width; the suffix of ``path`` sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for m in measurements:
        if m.work.startswith("length, forward ") and m.contender in _STYLE:
            _, length, _, width = m.work.removeprefix("length, forward ").split()
            curves[width][m.contender].append((int(length[1:]), m.median * 1e3))
    figure, axes = pyplot.subplots(1, len(curves), figsize=(5.2 * len(curves), 4.2), sharey=True, squeeze=False)
    for axis, width in zip(axes[0], sorted(curves, key=lambda width: int(width[1:])), strict=True):
        for name, points in curves[width].items():
            colour, label = _STYLE[name]
            axis.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=label, markersize=4, linewidth=1.6)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"8 heads of width {width[1:]}")
        axis.set_xlabel("tokens")
        axis.grid(True, which="major", alpha=0.25)
    axes[0][0].set_ylabel("forward pass, ms")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"Cost against length ({machine}, float32)", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
