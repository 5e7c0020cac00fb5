"""The language-model figure, from rows: curves, test bits, bits by position, energy of the keys."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.lm.claims import Runs
from efla.experiments.lm.config import CONTROLS
from efla.runs.records import Record, number
from efla.runs.statistics import Curve
from efla.runs.style import ARMS, figure_style, save

_TALL = 50.0
"""Step sizes above this are drawn on a logarithmic axis."""


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Four panels: validation during training, test bits of every seed, bits by position, largest step size."""
    runs = Runs(rows)
    arms = [arm for arm in runs.arms if runs.at(arm)]
    if not arms:
        return []
    with figure_style() as plt:
        figure, axes = plt.subplots(2, 2, figsize=(11, 7.4))
        _curves(axes[0, 0], runs, arms)
        _bits(axes[0, 1], runs, arms)
        _positions(axes[1, 0], runs, arms)
        _step_sizes(axes[1, 1], runs, arms)
        handles: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.tight_layout(h_pad=2.0, w_pad=2.0)
        figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0.01))
        files = save(figure, folder, "lm")
        plt.close(figure)
    return files


def _band(axis: Any, curve: Curve, arm: str) -> None:
    line, (x, values) = ARMS[arm], curve
    mean = [value.mean for value in values]
    axis.plot(x, mean, color=line.color, linestyle=line.dash, linewidth=line.width, label=line.label)
    if values and all(value.n > 1 for value in values):
        low, high = ([v.mean + sign * v.std for v in values] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=line.color, alpha=0.15, linewidth=0)


def _curves(axis: Any, runs: Runs, arms: Sequence[str]) -> None:
    for arm in arms:
        _band(axis, runs.over_bytes(arm, "validations"), arm)
    axis.set(xlabel="million bytes seen", ylabel="bits per byte", title="validation during training")


def _bits(axis: Any, runs: Runs, arms: Sequence[str]) -> None:
    """A dot for every run; the mean of several as a bar."""
    for i, arm in enumerate(arms):
        color = ARMS[arm].color
        values = [math.nan if row["failed"] else number(row["test"]["bits"]) for row in runs.at(arm)]
        finite = [v for v in values if math.isfinite(v)]
        axis.plot(finite, [i] * len(finite), "o", color=color, markersize=6, alpha=0.8)
        if len(finite) > 1:
            mean = sum(finite) / len(finite)
            axis.plot([mean, mean], [i - 0.3, i + 0.3], color=color, linewidth=2)
        if len(finite) < len(values):
            axis.text(0.02, i, "failed", transform=axis.get_yaxis_transform(), color=color, va="center")
    axis.set_yticks(range(len(arms)), [arm + (" (control)" if arm in CONTROLS else "") for arm in arms])
    axis.set_ylim(len(arms) - 0.5, -0.5)
    axis.set(xlabel="bits per byte (a dot a run, a line their mean)", title="test text")
    axis.grid(axis="y", visible=False)


def _positions(axis: Any, runs: Runs, arms: Sequence[str]) -> None:
    for arm in arms:
        curve = runs.over_positions(arm)
        if curve[0]:
            _band(axis, curve, arm)
    length = runs[0]["config"]["length"]
    axis.axvline(length, color="#222222", linewidth=0.8)
    axis.annotate("training length", (length, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                  textcoords="offset points", fontsize=8, va="top")  # fmt: skip
    axis.set(xlabel="position in the row, state carried", ylabel="bits per byte", title="test text by position")


def _step_sizes(axis: Any, runs: Runs, arms: Sequence[str]) -> None:
    drawn = False
    for arm in arms:
        curve = runs.over_bytes(arm, "largest_step_sizes")
        if curve[0]:
            drawn = True
            _band(axis, curve, arm)
    largest = [number(layer["step_size"][-1]) for row in runs if "keys" in row for layer in row["keys"]["layers"]]
    if not drawn or not largest:
        axis.set_visible(False)
        return
    axis.axhline(2.0, color="#222222", linewidth=0.8)
    axis.annotate("explicit Euler is stable below 2", (0.99, 2.0), xycoords=("axes fraction", "data"), xytext=(0, 3),
                  textcoords="offset points", fontsize=8, ha="right")  # fmt: skip
    axis.set(xlabel="million bytes seen", ylabel="largest βλ on a validation batch", title="raw keys")
    if max(largest) > _TALL:
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, None)
