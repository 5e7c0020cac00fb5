"""The figure of the exactness study, from rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.experiments.exactness.claims import by_study
from efla.experiments.exactness.config import UNGATED
from efla.runs.records import Record, number
from efla.runs.style import RULES as LINES
from efla.runs.style import figure_style, save


def plot(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Four panels: error of a step, amplification, memory over time, memory against key energy."""
    with figure_style() as plt:
        figure, axes = plt.subplots(2, 2, figsize=(10, 7.6))
        _errors(axes[0][0], by_study(rows, "order"))
        _stability(axes[0][1], by_study(rows, "stability"))
        _trace(axes[1][0], by_study(rows, "memory"))
        _energy(axes[1][1], by_study(rows, "memory"))
        handles: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.tight_layout(h_pad=2.0, w_pad=2.4)
        figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=5, bbox_to_anchor=(0.5, 0.005))
        files = save(figure, folder, "exactness")
        plt.close(figure)
    return files


def _draw(axis: Any, rule: str, x: Sequence[float], y: Sequence[float]) -> None:
    line = LINES[rule]
    top = 3 if rule == "efla" else 2
    axis.plot(x, y, color=line.color, linestyle=line.dash, linewidth=line.width, label=line.label, zorder=top)


def _errors(axis: Any, cells: dict[str, Record]) -> None:
    for rule, row in cells.items():
        _draw(axis, rule, row["x"], [max(number(e), 1e-17) for e in row["error"]])
    for order, x, y in ((1, 9e-4, 1.0e-8), (2, 3e-3, 1.3e-11), (4, 2.2e-2, 3e-13)):
        angle = math.degrees(math.atan(0.213 * (order + 1)))
        axis.text(x, y, f"order {order}", fontsize=8, color="#555555", rotation=angle, rotation_mode="anchor")
    axis.text(1.3e-4, 4e-15, "exact: rounding error only", fontsize=8, color=LINES["efla"].color)
    axis.axhspan(1e-17, 1.5e-15, color="#0b4f8a", alpha=0.06, linewidth=0)
    axis.set(
        xscale="log", yscale="log", xlim=(1e-4, 1e2), ylim=(3e-17, 1e4),
        xlabel="step size  x = β·λ", ylabel="relative error of one step",
        title="a   Error of one token's step against the true flow",
    )  # fmt: skip


def _stability(axis: Any, cells: dict[str, Record]) -> None:
    axis.axhspan(1, 4, color="#d55e00", alpha=0.08, linewidth=0)
    axis.axhspan(-4, -1, color="#d55e00", alpha=0.08, linewidth=0)
    axis.axhline(0, color="#999999", linewidth=0.7)
    for rule in (rule for rule in UNGATED if rule in cells):
        points = [(x, r) for x, r in zip(cells[rule]["x"], cells[rule]["factor"], strict=True) if x <= 8]
        _draw(axis, rule, *map(list, zip(*points, strict=True)))
        limit = number(cells[rule]["stability_limit"])
        if math.isfinite(limit):
            edge = 1 if rule != "delta" else -1
            axis.plot([limit], [edge], "o", color=LINES[rule].color, markersize=4.5, zorder=4)
    axis.text(7.9, 1.75, "memory grows: |R| > 1", ha="right", fontsize=8, color="#a04000")
    axis.text(7.9, -1.75, "grows, and flips its sign", ha="right", fontsize=8, color="#a04000")
    axis.set(
        xlim=(0, 8), ylim=(-2.2, 2.2), xlabel="step size  x = β·λ", ylabel="factor R(x) along the key",
        title="b   What one step multiplies the old memory by",
    )  # fmt: skip


def _trace(axis: Any, cells: dict[str, Record]) -> None:
    config = next(iter(cells.values()))["config"]
    start, length = config["burst_start"], config["burst_tokens"]
    axis.axvspan(start, start + length, color="#999999", alpha=0.18, linewidth=0)
    for rule in (rule for rule in UNGATED if rule in cells):
        _draw(axis, rule, range(len(cells[rule]["norm"])), [number(n) for n in cells[rule]["norm"]])
    size = config["beta"] * config["burst_energy"]
    axis.text(start - 3, 3e13, f"{length} energetic keys, x = {size:g}", ha="right", fontsize=8, color="#444444")
    axis.text(start - 3, 2e12, f"(the others: x = {config['beta']:g})", ha="right", fontsize=8, color="#444444")
    axis.set(
        yscale="log", xlim=(0, config["tokens"]), ylim=(0.1, 1e15), xlabel="token", ylabel="norm of the memory  ‖S‖",
        title="c   A burst of energetic keys",
    )  # fmt: skip


def _energy(axis: Any, cells: dict[str, Record]) -> None:
    top = 1e39
    for rule in (rule for rule in UNGATED if rule in cells):
        row = cells[rule]
        scale = [number(x) for x in row["scale"]]
        norm = [number(n) for n in row["largest_norm"]]
        finite = [(x, n) for x, n in zip(scale, norm, strict=True) if math.isfinite(n)]
        _draw(axis, rule, *map(list, zip(*finite, strict=True)))
        if len(finite) < len(scale):
            style = {"color": LINES[rule].color, "markersize": 7, "markeredgewidth": 2, "clip_on": False, "zorder": 5}
            axis.plot([scale[len(finite)]], [top], "x", **style)
    axis.axhline(3.4e38, color="#999999", linewidth=0.7, linestyle="--")
    axis.text(98, 3e36, "float32 ends here  (× = overflow)", ha="right", va="top", fontsize=8, color="#444444")  # noqa: RUF001
    axis.set(
        xscale="log", yscale="log", xlim=(1, 100), ylim=(0.01, top),
        xlabel="keys multiplied by", ylabel="largest ‖S‖ over the sequence",
        title="d   All keys of a sequence scaled up (float32)",
    )  # fmt: skip
    axis.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axis.minorticks_off()
