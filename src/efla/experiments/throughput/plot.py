"""The throughput figure, from rows: tokens per second by shape, and the ratio of the pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.throughput import claims
from efla.experiments.throughput.config import PAIRS
from efla.runs.records import Record
from efla.runs.style import ARMS, figure_style, save


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Bars of tokens per second with quartiles; ratios with quartiles beside them."""
    cells = claims.sorted_cells(rows)
    if not cells:
        return []
    with figure_style() as plt:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=(1.7, 1))
        _bars(left, cells)
        _ratios(right, cells)
        figure.tight_layout(w_pad=2.0)
        figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.01))
        files = save(figure, folder, "throughput")
        plt.close(figure)
    return files


def _bars(axis: Any, cells: Sequence[Record]) -> None:
    arms = claims.arms_of(cells)
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        found = [claims.tokens_per_second(row, arm) for row in cells]
        at = [j + (i - (len(arms) - 1) / 2) * width for j in range(len(found))]
        axis.bar(at, [q.median for q in found], 0.92 * width, color=ARMS[arm].color, label=ARMS[arm].label,
                 yerr=_spread(found), ecolor="#222222", error_kw={"linewidth": 1.0}, capsize=2)  # fmt: skip
    axis.set_xticks(range(len(cells)), [claims.name(row) for row in cells])
    axis.set(xlabel="length × rows of a step", ylabel="tokens per second", title="training throughput")  # noqa: RUF001
    axis.grid(axis="x", visible=False)


def _ratios(axis: Any, cells: Sequence[Record]) -> None:
    axis.axhspan(1 - claims.NEAR, 1 + claims.NEAR, color="#eeeeee")
    axis.axhline(1.0, color="#222222", linewidth=0.8)
    shifts = dict(zip(PAIRS, (-0.08, 0.08), strict=True))
    for ours, theirs in claims.pairs_of(cells):
        found = [claims.ratio(row, ours, theirs) for row in cells]
        at = [j + shifts[ours] for j in range(len(found))]
        axis.errorbar(at, [q.median for q in found], yerr=_spread(found), fmt="o", markersize=5,
                      color=ARMS[ours].color, capsize=3, label=f"{ours} over {theirs}")  # fmt: skip
    axis.set_xticks(range(len(cells)), [claims.name(row) for row in cells], rotation=30)
    axis.set_ylim(min(0.85, axis.get_ylim()[0]), max(1.15, axis.get_ylim()[1]))
    axis.set(title="ratio of throughputs", ylabel="median and quartiles over rounds")
    axis.legend(loc="lower left")


def _spread(found: Sequence[claims.Quartiles]) -> list[list[float]]:
    return [[q.median - q.low for q in found], [q.high - q.median for q in found]]
