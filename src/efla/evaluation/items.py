"""Results item by item: metrics, standard errors, and the paired comparison of two models.

Every metric is a function of two sums over items, so that resampling items resamples the metric:

    mean(x) = sum x / n,    perplexity = exp(-sum log p / sum weight),    bits = -sum log p / sum weight / ln 2
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efla.evaluation.table import ACCURACIES, COLUMNS, EXTRA_COLUMNS, MEAN, Column, format_number
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically

Array = NDArray[np.float64]
_OF_LOG_PROBS = {
    "perplexity": ("perplexity", None),  # LAMBADA: per passage
    "word_perplexity": ("perplexity", "words"),
    "byte_perplexity": ("perplexity", "bytes"),
    "bits_per_byte": ("bits", "bytes"),
}
"""Metric -> kind of :class:`Items`, and the field of an item that is its weight."""


@dataclass(frozen=True)
class Items:
    """Values and weights [n] of a metric's items. kind: "mean", "perplexity" or "bits" (see the top of this module)."""

    kind: str
    values: Array
    weights: Array

    def metric(self) -> float:
        return float(_combine(self.kind, self.values.sum(), self.weights.sum()))

    def exact_metric(self) -> float:
        """The metric of exactly rounded sums; perplexities that overflow are infinite."""
        return float(_combine(self.kind, math.fsum(self.values), float(self.weights.sum())))

    def resampled(self, counts: NDArray[np.int64]) -> Array:
        """The metric of each resample; counts [r, n] are how often each item was drawn."""
        return _combine(self.kind, counts @ self.values, counts @ self.weights)

    def standard_error(self) -> float:
        """For means, sample standard deviation / sqrt(n) as in the harness; for others, from 1,000 resamples."""
        n = len(self.values)
        if n < 2:
            return math.nan
        if self.kind == "mean":
            return float(self.values.std(ddof=1) / math.sqrt(n))
        found = np.concatenate([self.resampled(counts) for counts in resamples(n, 1000, seed=1234)])
        return float(found.std(ddof=1))


def resamples(n: int, times: int, seed: int, batch: int = 200) -> Any:
    """Counts [<= batch, n] of ``times`` draws of n items with replacement, determined by n and seed."""
    generator = np.random.default_rng([seed, n])
    for at in range(0, times, batch):
        rows = min(batch, times - at)
        drawn = generator.integers(n, size=(rows, n))
        yield np.stack([np.bincount(row, minlength=n) for row in drawn])


@dataclass(frozen=True)
class Difference:
    """B minus A of a metric, with a 95 % interval from the paired bootstrap over items.

    ``p_value`` is two-sided: twice the smaller share of resamples on one side of zero.
    """

    a: float
    b: float
    low: float
    high: float
    p_value: float
    num_items: int

    @property
    def value(self) -> float:
        return self.b - self.a

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(*pairs: tuple[Items, Items], times: int = 10_000, seed: int = 0) -> Difference:
    """The paired bootstrap of B - A over items; of several metrics, of their mean, with each one's items drawn on their own."""
    found = np.zeros(times)
    for number, (a, b) in enumerate(pairs, 1):
        if a.kind != b.kind or len(a.values) != len(b.values):
            raise ValueError(
                f"only the same items can be paired: A has {len(a.values)} of kind {a.kind!r}, B {len(b.values)} of {b.kind!r}"
            )
        draws = resamples(len(a.values), times, seed + 1000 * number if len(pairs) > 1 else seed)
        found += np.concatenate([b.resampled(counts) - a.resampled(counts) for counts in draws]) / len(pairs)
    mean_a, mean_b = (sum(pair[side].metric() for pair in pairs) / len(pairs) for side in (0, 1))
    low, high = np.quantile(found, [0.025, 0.975])
    p_value = min(1.0, 2 * min(float((found <= 0).mean()), float((found >= 0).mean())))
    return Difference(mean_a, mean_b, float(low), float(high), p_value, sum(len(a.values) for a, _ in pairs))


def _combine(kind: str, total: Any, weight: Any) -> Any:
    ratio = total / weight
    if kind == "mean":
        return ratio
    if kind == "bits":
        return -ratio / math.log(2)
    assert kind == "perplexity"
    with np.errstate(over="ignore"):
        return np.exp(-ratio)


def items_path(output: Path, model: str, task: str) -> Path:
    """The file with the items of a model and task."""
    return output / "items" / file_name(model) / f"{file_name(task)}.jsonl"


def file_name(name: str) -> str:
    """A name with the characters that file names should not have replaced."""
    return re.sub(r"[^\w.-]+", "__", name).strip(".") or "model"


def write_items(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per item, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(dumps(record) + "\n" for record in records).encode())


def read_items(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: it holds the items of a finished task; evaluate it again")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def metric_items(records: Sequence[dict[str, Any]], metric: str) -> Items:
    """A metric of the items that :func:`write_items` wrote: the mean of a field, or a function of log-probabilities."""
    if metric in records[0]:
        values = np.array([float(r[metric]) for r in records])
        return Items("mean", values, np.ones(len(values)))
    kind, weight = _OF_LOG_PROBS[metric]
    values = np.array([float(r["log_prob"]) for r in records])
    return Items(kind, values, np.array([float(r[weight]) if weight else 1.0 for r in records]))


def standard_errors(items: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, float]:
    """The standard error of each metric over items; NaN for metrics that the items do not have."""
    known = {*items[0], *(_OF_LOG_PROBS if "log_prob" in items[0] else ())}
    return {m: metric_items(items, m).standard_error() if m in known else math.nan for m in metrics}


def compare_models(
    rows: Sequence[Record], output: Path, a: str, b: str, *, times: int = 10_000
) -> list[tuple[Column, Difference]]:
    """B minus A for each column that both models have, and for the mean of the nine accuracies if both have all nine.

    Differences are in the table's units: percentage points for accuracies.
    """
    tasks = {(str(row["model"]), str(row["task"])) for row in rows if row.get("row") == "cell"}
    found: list[tuple[Column, Difference]] = []
    accuracies: list[tuple[Items, Items]] = []
    for column in (*COLUMNS, *EXTRA_COLUMNS):
        if not {(a, column.task), (b, column.task)} <= tasks:
            continue
        pair = _paired_items(output, a, b, column)
        found.append((column, _scaled(paired_difference(pair, times=times), column.unit)))
        if column.is_accuracy:
            accuracies.append(pair)
    if len(accuracies) == len(ACCURACIES):
        found.append((MEAN, _scaled(paired_difference(*accuracies, times=times), MEAN.unit)))
    if not found:
        raise ValueError(
            f"{a!r} and {b!r} have no task of the paper in common in {output}; evaluate both on the same tasks"
        )
    return found


def _paired_items(output: Path, a: str, b: str, column: Column) -> tuple[Items, Items]:
    files = [items_path(output, model, column.task) for model in (a, b)]
    first, second = (read_items(file) for file in files)
    if [_identity(r) for r in first] != [_identity(r) for r in second]:
        raise ValueError(
            f"{files[0]} and {files[1]} are of different items and cannot be paired; evaluate both models again "
            "on the same data"
        )
    return metric_items(first, column.metric), metric_items(second, column.metric)


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["doc_id"], record.get("doc_hash"), record.get("words"), record.get("bytes")


def _scaled(found: Difference, unit: float) -> Difference:
    return replace(found, a=unit * found.a, b=unit * found.b, low=unit * found.low, high=unit * found.high)


def comparison_lines(a: str, b: str, found: Sequence[tuple[Column, Difference]]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the comparison as text."""
    headings = ["", "items", f"A: {a}", f"B: {b}", "B - A", "95 % interval", "p", "verdict"]
    return headings, [_line(column, difference) for column, difference in found]


def _line(column: Column, d: Difference) -> list[str]:
    digits = 3 if "bits" in column.metric else 2
    if not all(map(math.isfinite, (d.a, d.b, d.low, d.high))):
        return [column.title, str(d.num_items), f"{d.a:.4g}", f"{d.b:.4g}", "", "", "", "not finite"]
    shown = [format_number(value, digits) for value in (d.a, d.b)]
    gaps = [format_number(value, digits, "+") for value in (d.value, d.low, d.high)]
    verdict = "no clear difference"
    if d.is_clear:
        verdict = "B better" if (d.value < 0) == column.lower_is_better else "A better"
    p = "< 0.001" if d.p_value < 0.001 else f"{d.p_value:.3f}"
    return [column.title, f"{d.num_items:,}", *shown, gaps[0], f"{gaps[1]} to {gaps[2]}", p, verdict]
