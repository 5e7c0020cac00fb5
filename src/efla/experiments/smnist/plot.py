"""The figures, from rows: accuracy against the level of each corruption, and loss and accuracy against the rate."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.smnist import claims
from efla.experiments.smnist.config import CHANCE_LOSS, MAIN_ARMS
from efla.runs.records import Record
from efla.runs.statistics import Rows, Spread
from efla.runs.style import ARMS, figure_style, save

PANELS = {
    "scale": "intensity multiplied by",
    "noise": "standard deviation of the noise",
    "dropout": "share of pixels dropped",
}


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """A figure per block for the main arms, with a row of panels per rate; a second one with all arms if there are more."""
    files: list[Path] = []
    conditions = claims.conditions_of(rows)
    for block in dict.fromkeys(at.block for at in conditions):
        mine = [at for at in conditions if at.block == block]
        files += _figure(rows, mine, MAIN_ARMS, folder, f"smnist-{block}")
        arms = claims.arms_of(Rows(rows).cells().where(block=block))
        if set(arms) - set(MAIN_ARMS):
            files += _figure(rows, mine[:1], arms, folder, f"smnist-{block}-all-arms")
    return files


def _figure(
    rows: Sequence[Record], conditions: Sequence[claims.Condition], arms: Sequence[str], folder: Path, name: str
) -> list[Path]:
    with figure_style() as plt:
        figure, axes = plt.subplots(len(conditions), 4, figsize=(13, 3.1 * len(conditions)), squeeze=False)
        for line, at in zip(axes, conditions, strict=True):
            for axis, kind in zip(line, PANELS, strict=False):
                for arm in arms:
                    levels, curve = claims.levels_of(rows, at, arm, kind).curve("level", "accuracy")
                    band(axis, levels, curve, arm, 100)
                axis.set(ylim=(0, 100), xlabel=PANELS[kind], title=kind)
                if kind == "scale":
                    axis.set_xscale("log", base=2)
                    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
            line[0].set_ylabel(f"rate {at.rate:g}\naccuracy, %")
            for arm in arms:
                steps, curve = claims.loss_curve(rows, at, arm)
                band(line[3], steps, curve, arm, 1)
            line[3].set(xlabel="step", ylabel="training loss", title="training", ylim=(0, None))
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.tight_layout(w_pad=1.5)
        figure.legend(handles, labels, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.01))
        files = save(figure, folder, name)
        plt.close(figure)
    return files


def band(axis: Any, x: Sequence[float], curve: Sequence[Spread], arm: str, unit: float) -> None:
    """A curve with a band of ± one standard deviation."""
    if not x:
        return
    line = ARMS[arm]
    mean = [unit * point.mean for point in curve]
    marker = "o" if len(x) < 30 else None
    axis.plot(
        x,
        mean,
        color=line.color,
        linestyle=line.dash,
        linewidth=line.width,
        label=line.label,
        marker=marker,
        markersize=3,
    )
    if all(point.n > 1 for point in curve):
        low, high = ([unit * (point.mean + sign * point.std) for point in curve] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=line.color, alpha=0.15, linewidth=0)


def accuracy_floor(rows: Sequence[Record]) -> float:
    """Lower end of an accuracy axis in percent: a multiple of ten below all values."""
    lowest = min((100 * row["clean_accuracy"] for row in Rows(rows).cells()), default=0.0)
    return max(0.0, 10.0 * math.floor((lowest - 5) / 10))


def plot_rates(rows: Sequence[Record], folder: Path, block: str = "bare") -> list[Path]:
    """Loss and accuracy against the rate. A diverged run is a cross at the top edge."""
    rates = claims.rates_of(rows, block)
    if not rates:
        return []
    arms = [arm for arm in MAIN_ARMS if arm in claims.arms_of(Rows(rows).cells())]
    with figure_style() as plt:
        figure = plt.figure(figsize=(11, 6.2))
        above, below = figure.add_gridspec(2, 1, height_ratios=(1.15, 1), hspace=0.5)
        loss_axis, accuracy_axis = (figure.add_subplot(cell) for cell in above.subgridspec(1, 2, wspace=0.22))
        curves = [figure.add_subplot(cell) for cell in below.subgridspec(1, len(rates), wspace=0.32)]
        for arm in arms:
            for axis, field, unit in ((loss_axis, "final_loss", 1), (accuracy_axis, "clean_accuracy", 100)):
                points = [
                    (rate, claims.runs_of(rows, claims.Condition(block, rate), arm).spread(field)) for rate in rates
                ]
                finite = [(rate, point) for rate, point in points if point.n and not math.isnan(point.mean)]
                band(axis, [rate for rate, _ in finite], [point for _, point in finite], arm, unit)
            for row in Rows(rows).cells():
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
                steps, curve = claims.loss_curve(rows, claims.Condition(block, rate), arm)
                band(axis, steps, curve, arm, 1)
            axis.set(ylim=(0, 2.5), xlabel="step", title=f"rate {rate:g}")
        handles, labels = accuracy_axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.045))
        files = save(figure, folder, "lr")
        plt.close(figure)
    return files
