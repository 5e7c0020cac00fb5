"""Numbers from rows: metrics over seeds, curves, bits by position. A failed run's numbers are not-a-number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from efla.evaluation.table import COLUMNS
from efla.experiments.lm.config import ARM_ORDER, PEAK_RATE
from efla.runs.records import Record, number
from efla.runs.statistics import Spread, spread


class Metric(NamedTuple):
    """A number of a row: where it stands, what it is called, how it is shown."""

    group: str
    key: str
    title: str
    unit: float = 1.0
    digits: int = 2
    lower_is_better: bool = True


METRICS = {
    "bits": Metric("test", "bits", "test bits per byte", digits=4),
    "perplexity": Metric("test", "perplexity", "test byte perplexity", digits=3),
    "validation": Metric("validation", "bits", "validation bits per byte", digits=4),
    "wikitext": Metric("wikitext", "word_perplexity", "WikiText word perplexity", digits=0),
    "lambada_perplexity": Metric("lambada", "perplexity", "LAMBADA perplexity per word", digits=0),
    "lambada_accuracy": Metric("lambada", "accuracy", "LAMBADA accuracy, %", 100.0, 2, False),
}
CHOICES = {c.task: c for c in COLUMNS if c.is_accuracy and c.task != "lambada_openai"}


def runs(rows: Sequence[Record]) -> list[Record]:
    """The rows that sum up a run."""
    return [row for row in rows if row.get("row") == "cell" and "arm" in row]


def arms_of(rows: Sequence[Record]) -> list[str]:
    """Arms in the rows, in the order of the config."""
    found = {row["arm"] for row in runs(rows)}
    return [arm for arm in ARM_ORDER if arm in found]


def rates_of(rows: Sequence[Record]) -> list[float]:
    return sorted({float(row["rate"]) for row in runs(rows)})


def judged_rate(rows: Sequence[Record]) -> float:
    """The rate of the table: the protocol's if it was run, else the one of most runs."""
    counts = Counter(float(row["rate"]) for row in runs(rows))
    return PEAK_RATE if PEAK_RATE in counts else counts.most_common(1)[0][0]


def chosen(rows: Sequence[Record], arm: str, rate: float | None = None) -> list[Record]:
    """The runs of an arm at a rate, by seed."""
    rate = judged_rate(rows) if rate is None else rate
    return sorted((row for row in runs(rows) if row["arm"] == arm and row["rate"] == rate), key=lambda r: r["seed"])


def value(row: Record, metric: Metric) -> float | None:
    """A metric of a run; ``None`` if it was not measured, not-a-number if the run failed."""
    if metric.group not in row:
        return None
    return math.nan if row["failed"] else number(row[metric.group][metric.key])


def over_seeds(
    rows: Sequence[Record], arm: str, name: str, rate: float | None = None, *, shared_with: str | None = None
) -> Spread:
    """A metric of an arm over its seeds, or over those of them that another arm has too."""
    mine = chosen(rows, arm, rate)
    if shared_with is not None:
        theirs = {row["seed"] for row in chosen(rows, shared_with, rate)}
        mine = [row for row in mine if row["seed"] in theirs]
    values = [value(row, METRICS[name]) for row in mine]
    return spread(v for v in values if v is not None)


def text(found: Spread, metric: Metric) -> str:
    """A metric as it is shown, large numbers with commas."""
    if metric.digits or not found.n or math.isnan(found.mean):
        return found.text(metric.unit, metric.digits)
    return f"{found.mean:,.0f}" + ("" if found.n < 2 else f" ± {found.std:,.0f}")


def show(rows: Sequence[Record], arm: str, name: str, rate: float | None = None) -> str:
    return text(over_seeds(rows, arm, name, rate), METRICS[name])


def choice(rows: Sequence[Record], arm: str, task: str) -> tuple[float, int] | None:
    """Accuracy of a multiple-choice set, by the paper's metric, and its items; of the one seed it was scored for."""
    for row in chosen(rows, arm):
        if "choices" in row:
            found = row["choices"][task]
            return number(found[CHOICES[task].metric]), found["items"]
    return None


def curve(
    rows: Sequence[Record], arm: str, key: str = "validations", rate: float | None = None
) -> tuple[list[int], list[Spread]]:
    """Bits per byte against bytes seen, over the seeds that got that far."""
    found: dict[int, list[float]] = {}
    for row in chosen(rows, arm, rate):
        per_step = row["bytes_seen"] // row["steps"]
        for step, bits in row[key]:
            found.setdefault(int(step) * per_step, []).append(number(bits))
    return sorted(found), [spread(found[at]) for at in sorted(found)]


def positions(rows: Sequence[Record], arm: str) -> tuple[list[int], list[Spread]]:
    """Bits per byte by position (the last of each bucket), over seeds."""
    mine = [row["positions"] for row in chosen(rows, arm) if "positions" in row and not row["failed"]]
    if not mine:
        return [], []
    return mine[0]["ends"], [spread(number(p["bits"][i]) for p in mine) for i in range(len(mine[0]["ends"]))]


def failed(rows: Sequence[Record], arm: str) -> int:
    return sum(bool(row["failed"]) for row in runs(rows) if row["arm"] == arm)
