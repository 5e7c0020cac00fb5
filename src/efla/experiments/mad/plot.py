"""The MAD figures, from rows: a bar per arm and task with the spread over seeds, and the training loss."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.mad import claims
from efla.runs.records import Record
from efla.runs.style import ARMS, figure_style, save

TITLES = {
    "memorization": "Memorize",
    "compression": "Compress",
    "in-context-recall": "In-context recall",
    "noisy-in-context-recall": "Noisy recall",
    "fuzzy-in-context-recall": "Fuzzy recall",
    "selective-copying": "Selective copying",
}


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Bars per task in one figure, the training loss against the step in a second one."""
    tasks, arms = claims.tasks_of(rows), claims.arms_of(rows)
    if not tasks:
        return []
    with figure_style() as plt:
        figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), squeeze=False)
        for axis, task in zip(axes.flat, tasks, strict=False):
            _bars(axis, rows, task, arms)
        files = _finish(plt, figure, axes, tasks, folder, "mad")
        figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), squeeze=False)
        for axis, task in zip(axes.flat, tasks, strict=False):
            _curves(axis, rows, task, arms)
        files += _finish(plt, figure, axes, tasks, folder, "mad-training")
    return files


def _finish(plt: Any, figure: Any, axes: Any, tasks: Sequence[str], folder: Path, name: str) -> list[Path]:
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.tight_layout(h_pad=1.6, w_pad=1.4)
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.01))
    files = save(figure, folder, name)
    plt.close(figure)
    return files


def _bars(axis: Any, rows: Sequence[Record], task: str, arms: Sequence[str]) -> None:
    """A group of bars per setting, ± one standard deviation if there are several seeds; a text if no run is finite."""
    settings = claims.settings_of(rows, task)
    width = 0.8 / max(1, len(arms))
    for i, arm in enumerate(arms):
        line = ARMS[arm]
        for j, setting in enumerate(settings):
            score = claims.setting_spread(rows, task, setting, arm)
            if score.n == 0:
                continue
            at = j + (i - (len(arms) - 1) / 2) * width
            if math.isnan(score.mean):
                axis.text(at, 2, score.text(), color=line.color, rotation=90, ha="center", va="bottom", fontsize=8)
                continue
            error = 100 * score.std if score.n > 1 else None
            axis.bar(at, 100 * score.mean, 0.92 * width, color=line.color, label=line.label, yerr=error, ecolor="#222222",
                     error_kw={"linewidth": 1.0}, capsize=2.5)  # fmt: skip
            if len(settings) * len(arms) <= 8:
                axis.text(at, 100 * score.mean + 2.5 + (error or 0), f"{100 * score.mean:.1f}", ha="center", fontsize=7)
    axis.set_xticks(range(len(settings)), settings, rotation=0 if len(settings) < 4 else 60)
    axis.set(xlim=(-0.5, len(settings) - 0.5), ylim=(0, 112), title=TITLES[task], ylabel="accuracy, %")
    axis.set_yticks(range(0, 101, 25))
    axis.grid(axis="x", visible=False)


def _curves(axis: Any, rows: Sequence[Record], task: str, arms: Sequence[str]) -> None:
    setting = claims.settings_of(rows, task)[0]
    for arm in arms:
        steps, values = claims.loss_curve(rows, task, setting, arm)
        if steps:
            line = ARMS[arm]
            axis.plot(steps, [value.mean for value in values], color=line.color, linestyle=line.dash,
                      linewidth=line.width, label=line.label)  # fmt: skip
            if any(value.n > 1 for value in values):
                std = [value.std if value.n > 1 else 0.0 for value in values]
                low, high = ([v.mean + sign * d for v, d in zip(values, std, strict=True)] for sign in (-1, 1))
                axis.fill_between(steps, low, high, color=line.color, alpha=0.15, linewidth=0)
    axis.set(ylim=(0, None), xlabel="optimiser step", ylabel="training loss", title=f"{TITLES[task]}, {setting}")
