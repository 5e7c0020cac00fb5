"""The robustness figures, from rows alone: accuracy against the level of each corruption, and the training loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.smnist import select
from efla.experiments.smnist.config import MAIN_ARMS
from efla.experiments.smnist.select import Setting
from efla.runs.records import Record
from efla.runs.statistics import Spread
from efla.runs.style import ARMS, figure_style, save

PANELS = {
    "scale": "intensity multiplied by",
    "noise": "standard deviation of the noise",
    "dropout": "share of pixels dropped",
}


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """One figure per block for the main arms, a row of panels per rate; a second one with every arm where there are more."""
    files: list[Path] = []
    settings = select.settings_of(rows)
    for block in dict.fromkeys(setting.block for setting in settings):
        mine = [setting for setting in settings if setting.block == block]
        files += _figure(rows, mine, MAIN_ARMS, folder, f"smnist-{block}")
        arms = select.arms_of([row for row in select.runs(rows) if row["block"] == block])
        if set(arms) - set(MAIN_ARMS):
            files += _figure(rows, mine[:1], arms, folder, f"smnist-{block}-all-arms")
    return files


def _figure(
    rows: Sequence[Record], settings: Sequence[Setting], arms: Sequence[str], folder: Path, name: str
) -> list[Path]:
    with figure_style() as plt:
        figure, axes = plt.subplots(len(settings), 4, figsize=(13, 3.1 * len(settings)), squeeze=False)
        for line, setting in zip(axes, settings, strict=True):
            for axis, kind in zip(line, PANELS, strict=False):
                for arm in arms:
                    levels, curve = select.level_curve(rows, setting, arm, kind)
                    band(axis, levels, curve, arm, 100)
                axis.set(ylim=(0, 100), xlabel=PANELS[kind], title=kind)
                if kind == "scale":
                    axis.set_xscale("log", base=2)
                    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
            line[0].set_ylabel(f"rate {setting.rate:g}\naccuracy, %")
            for arm in arms:
                steps, curve = select.loss_curve(rows, setting, arm)
                band(line[3], steps, curve, arm, 1)
            line[3].set(xlabel="step", ylabel="training loss", title="training", ylim=(0, None))
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.tight_layout(w_pad=1.5)
        figure.legend(handles, labels, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.01))
        files = save(figure, folder, name)
        plt.close(figure)
    return files


def band(axis: Any, x: Sequence[float], curve: Sequence[Spread], arm: str, unit: float) -> None:
    """A curve with a band of plus and minus one standard deviation."""
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
