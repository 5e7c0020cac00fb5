"""A run's loss curve, from its metrics: ``python -m efla.train.plot RUN FILE``."""

import math
import sys
from pathlib import Path

from efla.runs.style import figure_style
from efla.train.output import read_metrics

_POINTS = 400


def plot_run(folder: Path, file: Path) -> None:
    """Training loss (averaged over groups of steps in long runs) and validation loss, in bits per token over tokens seen."""
    rows = read_metrics(folder)
    steps = [(row["tokens"], float(row["loss"]) / math.log(2)) for row in rows if row["event"] == "step"]
    tokens_at = {row["step"]: row["tokens"] for row in rows if row["event"] == "step"}
    validations = [(tokens_at[row["step"]], row["bits_per_token"]) for row in rows if row["event"] == "validation"]
    if not steps:
        raise ValueError(f"{folder} has no finished step to draw")
    width = max(1, len(steps) // _POINTS)
    groups = [steps[first : first + width] for first in range(0, len(steps) - width + 1, width)]
    means = [(group[-1][0], sum(loss for _, loss in group) / width) for group in groups]
    with figure_style() as plt:
        figure, axis = plt.subplots(figsize=(6.4, 3.6))
        label = "training" if width == 1 else f"training, mean of {width} steps"
        axis.plot(*zip(*means, strict=True), color="#56b4e9", linewidth=1.0, label=label)
        if validations:
            axis.plot(
                *zip(*validations, strict=True), "o-", color="#0b4f8a", markersize=3, linewidth=1.6, label="validation"
            )
        axis.set_xlabel("tokens seen")
        axis.set_ylabel("bits per token")
        axis.set_xscale("log")
        axis.legend()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, bbox_inches="tight", metadata={"Date": None} if file.suffix == ".svg" else None)
        plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m efla.train.plot RUN FILE.svg")
    plot_run(Path(sys.argv[1]), Path(sys.argv[2]))
