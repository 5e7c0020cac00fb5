"""The language-model figure, from rows alone: curves, test bits, bits by position, energy of the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.lm import select
from efla.experiments.lm.config import CONTROLS
from efla.runs.records import Record, number
from efla.runs.statistics import Spread
from efla.runs.style import ARMS, figure_style, save

_TALL = 50.0
"""Step sizes beyond this are drawn on a logarithmic axis."""


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Four panels: validation on the way, test bits with every seed, bits by position, largest step size on the way."""
    arms = [arm for arm in select.arms_of(rows) if select.chosen(rows, arm)]
    if not arms:
        return []
    with figure_style() as plt:
        figure, axes = plt.subplots(2, 2, figsize=(11, 7.4))
        _curves(axes[0, 0], rows, arms)
        _bits(axes[0, 1], rows, arms)
        _positions(axes[1, 0], rows, arms)
        _step_sizes(axes[1, 1], rows, arms)
        handles: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.tight_layout(h_pad=2.0, w_pad=2.0)
        figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0.01))
        files = save(figure, folder, "lm")
        plt.close(figure)
    return files


def _band(axis: Any, x: Sequence[float], values: Sequence[Spread], arm: str) -> None:
    line = ARMS[arm]
    mean = [value.mean for value in values]
    axis.plot(x, mean, color=line.color, linestyle=line.dash, linewidth=line.width, label=line.label)
    if values and all(value.n > 1 for value in values):
        low, high = ([v.mean + sign * v.std for v in values] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=line.color, alpha=0.15, linewidth=0)


def _curves(axis: Any, rows: Sequence[Record], arms: Sequence[str]) -> None:
    for arm in arms:
        seen, values = select.curve(rows, arm)
        _band(axis, [at / 1e6 for at in seen], values, arm)
    axis.set(xlabel="million bytes seen", ylabel="bits per byte", title="validation during training")


def _bits(axis: Any, rows: Sequence[Record], arms: Sequence[str]) -> None:
    """A dot for every run; the mean of several as a bar."""
    for i, arm in enumerate(arms):
        color = ARMS[arm].color
        values = [select.value(row, select.METRICS["bits"]) for row in select.chosen(rows, arm)]
        finite = [v for v in values if v is not None and math.isfinite(v)]
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


def _positions(axis: Any, rows: Sequence[Record], arms: Sequence[str]) -> None:
    for arm in arms:
        ends, values = select.positions(rows, arm)
        if ends:
            _band(axis, ends, values, arm)
    length = select.runs(rows)[0]["config"]["length"]
    axis.axvline(length, color="#222222", linewidth=0.8)
    axis.annotate("training length", (length, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                  textcoords="offset points", fontsize=8, va="top")  # fmt: skip
    axis.set(xlabel="position in the row, state carried", ylabel="bits per byte", title="test text by position")


def _step_sizes(axis: Any, rows: Sequence[Record], arms: Sequence[str]) -> None:
    drawn = False
    for arm in arms:
        seen, values = select.curve(rows, arm, "largest_step_sizes")
        if seen:
            drawn = True
            _band(axis, [at / 1e6 for at in seen], values, arm)
    largest = [
        number(record["step_size"][-1])
        for row in select.runs(rows)
        if "keys" in row
        for record in row["keys"]["layers"]
    ]
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
