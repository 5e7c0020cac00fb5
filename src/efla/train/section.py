"""A run's loss curve, from its metrics."""

import math
from pathlib import Path

from efla.runs.chart import Chart, Figure, Point, Series
from efla.train.output import read_metrics

_POINTS = 400


def save_curve(folder: Path) -> None:
    """Draw the :func:`curve` of a run to ``curve.svg`` in its folder; without the packages for charts, do nothing."""
    from efla.runs.vega import save, unavailable

    if not unavailable() and any(row["event"] == "step" for row in read_metrics(folder)):
        save(curve(folder), folder, ("svg",))


def curve(folder: Path) -> Figure:
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
    label = "training" if width == 1 else f"training, mean of {width} steps"
    series = [
        Series(key, name, [Point(float(tokens), bits) for tokens, bits in points])
        for key, name, points in (("training", label, means), ("validation", "validation", validations))
    ]
    title, y_label = "Loss during training", "bits per token"
    return Figure("curve", title, "", [Chart(title, "tokens seen", y_label, series, log_x=len(means) > 1)])
