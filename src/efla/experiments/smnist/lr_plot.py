"""The learning-rate figure, from rows alone: final loss and clean accuracy against the rate, and the loss curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from efla.experiments.smnist import select
from efla.experiments.smnist.config import MAIN_ARMS
from efla.experiments.smnist.plot import band
from efla.experiments.smnist.select import Setting
from efla.experiments.smnist.train import CHANCE_LOSS
from efla.runs.records import Record
from efla.runs.style import ARMS, figure_style, save


def accuracy_floor(rows: Sequence[Record]) -> float:
    """Lower end of an accuracy axis in percent: a multiple of ten below all values."""
    lowest = min((100 * row["clean_accuracy"] for row in select.runs(rows)), default=0.0)
    return max(0.0, 10.0 * math.floor((lowest - 5) / 10))


def plot(rows: Sequence[Record], folder: Path, block: str = "bare") -> list[Path]:
    """Loss and accuracy against the rate; a diverged run keeps its place at the top edge with a cross."""
    rates = select.rates_of(rows, block)
    if not rates:
        return []
    arms = [arm for arm in MAIN_ARMS if arm in select.arms_of(select.runs(rows))]
    with figure_style() as plt:
        figure = plt.figure(figsize=(11, 6.2))
        above, below = figure.add_gridspec(2, 1, height_ratios=(1.15, 1), hspace=0.5)
        loss_axis, accuracy_axis = (figure.add_subplot(cell) for cell in above.subgridspec(1, 2, wspace=0.22))
        curves = [figure.add_subplot(cell) for cell in below.subgridspec(1, len(rates), wspace=0.32)]
        for arm in arms:
            for axis, field, unit in ((loss_axis, "final_loss", 1), (accuracy_axis, "clean_accuracy", 100)):
                points = [(rate, select.run_spread(rows, Setting(block, rate), arm, field)) for rate in rates]
                finite = [(rate, point) for rate, point in points if point.n and not math.isnan(point.mean)]
                band(axis, [rate for rate, _ in finite], [point for _, point in finite], arm, unit)
            for row in select.runs(rows):
                if row["arm"] == arm and row["block"] == block and row["diverged"]:
                    loss_axis.plot(
                        [row["rate"]], [CHANCE_LOSS], "x", color=ARMS[arm].color, markersize=8, clip_on=False
                    )
        loss_axis.set(
            xscale="log",
            ylim=(0, CHANCE_LOSS),
            xlabel="learning rate",
            ylabel="final training loss",
            title="loss  (× diverged)",  # noqa: RUF001
        )
        accuracy_axis.set(
            xscale="log",
            ylim=(accuracy_floor(rows), 100),
            xlabel="learning rate",
            ylabel="clean accuracy, %",
            title="accuracy",
        )
        for axis, rate in zip(curves, rates, strict=True):
            for arm in arms:
                steps, curve = select.loss_curve(rows, Setting(block, rate), arm)
                band(axis, steps, curve, arm, 1)
            axis.set(ylim=(0, 2.5), xlabel="step", title=f"rate {rate:g}")
        handles, labels = accuracy_axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.045))
        files = save(figure, folder, "lr")
        plt.close(figure)
    return files
