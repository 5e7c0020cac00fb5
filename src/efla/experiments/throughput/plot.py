"""The throughput figure, from rows alone: tokens per second by setting, and the ratio of the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.throughput import select
from efla.experiments.throughput.claims import NEAR
from efla.experiments.throughput.config import PAIRS
from efla.runs.records import Record
from efla.runs.style import ARMS, figure_style, save


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Bars of tokens per second with quartiles; ratios with quartiles beside them."""
    cells = select.cells(rows)
    if not cells:
        return []
    with figure_style() as plt:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=(1.7, 1))
        _bars(left, rows, cells)
        _ratios(right, rows, cells)
        figure.tight_layout(w_pad=2.0)
        figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.01))
        files = save(figure, folder, "throughput")
        plt.close(figure)
    return files


def _bars(axis: Any, rows: Sequence[Record], cells: Sequence[Record]) -> None:
    arms = select.arms_of(rows)
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        found = [(j, q) for j, row in enumerate(cells) if (q := select.tokens_per_second(row, arm)) is not None]
        at = [j + (i - (len(arms) - 1) / 2) * width for j, _ in found]
        spread = [[q.median - q.low for _, q in found], [q.high - q.median for _, q in found]]
        axis.bar(at, [q.median for _, q in found], 0.92 * width, color=ARMS[arm].color, label=ARMS[arm].label,
                 yerr=spread, ecolor="#222222", error_kw={"linewidth": 1.0}, capsize=2)  # fmt: skip
    axis.set_xticks(range(len(cells)), [select.name(row) for row in cells])
    axis.set(xlabel="length × rows of a step", ylabel="tokens per second", title="training throughput")  # noqa: RUF001
    axis.grid(axis="x", visible=False)


def _ratios(axis: Any, rows: Sequence[Record], cells: Sequence[Record]) -> None:
    arms = select.arms_of(rows)
    axis.axhspan(1 - NEAR, 1 + NEAR, color="#eeeeee")
    axis.axhline(1.0, color="#222222", linewidth=0.8)
    for shift, (ours, theirs) in zip((-0.08, 0.08), PAIRS.items(), strict=True):
        if ours not in arms or theirs not in arms:
            continue
        found = [(j, q) for j, row in enumerate(cells) if (q := select.ratio(row, ours, theirs)) is not None]
        spread = [[q.median - q.low for _, q in found], [q.high - q.median for _, q in found]]
        axis.errorbar([j + shift for j, _ in found], [q.median for _, q in found], yerr=spread, fmt="o", markersize=5,
                      color=ARMS[ours].color, capsize=3, label=f"{ours} over {theirs}")  # fmt: skip
    axis.set_xticks(range(len(cells)), [select.name(row) for row in cells], rotation=30)
    axis.set_ylim(min(0.85, axis.get_ylim()[0]), max(1.15, axis.get_ylim()[1]))
    axis.set(title="ratio of throughputs", ylabel="median and quartiles over rounds")
    axis.legend(loc="lower left")
