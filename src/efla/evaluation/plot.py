"""Figures of ``efla eval --length``, drawn from rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.runs.records import Record, number
from efla.runs.style import ARMS, RULES, figure_style, save

_OWN = {**{rule: rule for rule in RULES}, "softmax": "attention", "mamba2": "mamba2"}
# Colours for other models, and for a second model with the same mixer.
_OTHERS = ("implicit_euler", "rk4", "rk2", "crank_nicolson", "delta-l2", "gated-delta", "gated-exact-flow")


def line_keys(rows: Sequence[Record]) -> dict[str, str]:
    """The style key of each model: that of its mixer if it is free."""
    mixers = {str(row["model"]): str(row.get("mixers", "")).split(" ")[0] for row in rows if row.get("row") == "cell"}
    found: dict[str, str] = {}
    for model, mixer in mixers.items():
        if mixer in _OWN and _OWN[mixer] not in found.values():
            found[model] = _OWN[mixer]
    free = [key for key in _OTHERS if key not in found.values()]
    for index, model in enumerate(model for model in mixers if model not in found):
        found[model] = free[index % len(free)]
    return {model: found[model] for model in mixers}


def style(key: str) -> tuple[str, str, float]:
    """Colour, dash pattern and line width."""
    line = {**ARMS, **RULES}[key]
    return line.color, line.dash, line.width


def plot_length(rows: Sequence[Record], output: Path) -> list[Path]:
    """Bits per byte against position, and recall against pairs (a panel per length) and against length (per pairs)."""
    keys = line_keys(rows)
    files: list[Path] = []
    with figure_style() as plt:
        positions = [row for row in rows if row["row"] == "position"]
        if positions:
            figure, axes = plt.subplots(figsize=(6.4, 3.8))
            for model, key in keys.items():
                own = [row for row in positions if row["model"] == model]
                if not own:
                    continue
                color, dash, width = style(key)
                x = [float(row["end"]) for row in own]
                y = [number(row["bits_per_byte"]) for row in own]
                scale = y[0] / number(own[0]["bits_per_token"]) if number(own[0]["bits_per_token"]) else 1.0
                error = [scale * number(row["standard_error"]) for row in own]
                axes.plot(x, y, color=color, linestyle=dash, linewidth=width, label=model, marker="o", markersize=3)
                axes.fill_between(x, [a - e for a, e in zip(y, error, strict=True)],
                                  [a + e for a, e in zip(y, error, strict=True)], color=color, alpha=0.15)  # fmt: skip
            _plain_ticks(axes, [int(row["end"]) for row in positions])
            axes.set_xlabel("position (end of the bucket)")
            axes.set_ylabel("bits per byte")
            axes.set_title("Loss by position, state carried")
            axes.legend()
            files += save(figure, output / "figures", "bits_by_position")
            plt.close(figure)
        probes = [row for row in rows if row["row"] == "recall"]
        for varied, fixed, label in (("num_pairs", "length", "pairs"), ("length", "num_pairs", "length")):
            if not probes:
                break
            panels = sorted({int(row[fixed]) for row in probes})
            figure, grid = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.2), sharey=True, squeeze=False)
            for axes, value in zip(grid[0], panels, strict=True):
                here = [row for row in probes if int(row[fixed]) == value]
                for model, key in keys.items():
                    own = sorted((row for row in here if row["model"] == model), key=lambda row: int(row[varied]))
                    color, dash, width = style(key)
                    axes.errorbar(
                        [int(row[varied]) for row in own],
                        [100 * number(row["among_values"]) for row in own],
                        yerr=[100 * number(row["among_values_error"]) for row in own],
                        color=color, linestyle=dash, linewidth=width, label=model, marker="o", markersize=3,
                    )  # fmt: skip
                chance = sorted({(int(row[varied]), 100 * number(row["chance"])) for row in here})
                axes.plot([x for x, _ in chance], [y for _, y in chance], color="#888888", linewidth=1, label="chance")
                _plain_ticks(axes, [x for x, _ in chance])
                axes.set_ylim(0, 102)
                axes.set_xlabel(label)
                axes.set_title(f"length {value:,}" if fixed == "length" else f"{value} pairs")
            grid[0][0].set_ylabel("recall among the values, %")
            grid[0][-1].legend()
            files += save(figure, output / "figures", f"recall_by_{label}")
            plt.close(figure)
    return files


def _plain_ticks(axes: Any, values: Sequence[int]) -> None:
    """A logarithmic axis with ticks at the values, thinned out if there are many."""
    ticks = sorted(set(values))
    ticks = ticks[:: 1 + len(ticks) // 9]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
