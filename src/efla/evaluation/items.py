"""Results item by item: what each metric averages over, its standard error, and paired differences.

Every metric here is a function of two sums over items, so that resampling items resamples the metric:

    mean(x) = sum x / n,    perplexity = exp(-sum log p / sum weight),    bits = -sum log p / sum weight / ln 2
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efla.runs.records import dumps
from efla.runs.rows import write_atomically

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Items:
    """One metric of one task: per item a value and a weight [n], and how their sums make the metric.

    kind: "mean" is sum(value) / sum(weight); "perplexity" is its exp with the sign changed; "bits" it is in bits.
    """

    kind: str
    values: Array
    weights: Array

    def metric(self) -> float:
        return float(_combine(self.kind, self.values.sum(), self.weights.sum()))

    def resampled(self, counts: NDArray[np.int64]) -> Array:
        """The metric of each resample; counts [r, n] says how often each item was drawn."""
        return _combine(self.kind, counts @ self.values, counts @ self.weights)

    def standard_error(self) -> float:
        """Of a mean: sample standard deviation / sqrt(n), as the harness has it. Of the others: over 1,000 resamples."""
        n = len(self.values)
        if n < 2:
            return math.nan
        if self.kind == "mean":
            return float(self.values.std(ddof=1) / math.sqrt(n))
        found = np.concatenate([self.resampled(counts) for counts in resamples(n, 1000, seed=1234)])
        return float(found.std(ddof=1))


def resamples(n: int, times: int, seed: int, batch: int = 200) -> Any:
    """Counts [<= batch, n] of ``times`` draws of n items with replacement; the same for the same n and seed."""
    generator = np.random.default_rng([seed, n])
    for at in range(0, times, batch):
        rows = min(batch, times - at)
        drawn = generator.integers(n, size=(rows, n))
        yield np.stack([np.bincount(row, minlength=n) for row in drawn])


@dataclass(frozen=True)
class Difference:
    """B minus A of a metric, with a 95 % interval over items drawn with replacement, the same items for both.

    ``p_value``: two-sided, how surprising a difference of the other sign would be: twice the smaller share of resamples on
    one side of zero.
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
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired_difference(a: Items, b: Items, *, times: int = 10_000, seed: int = 0) -> Difference:
    """The paired bootstrap of B - A over items."""
    if a.kind != b.kind or len(a.values) != len(b.values):
        raise ValueError(
            f"only the same items can be paired: A has {len(a.values)} of kind {a.kind!r}, B {len(b.values)} of {b.kind!r}"
        )
    found = np.concatenate(
        [b.resampled(counts) - a.resampled(counts) for counts in resamples(len(a.values), times, seed)]
    )
    return _difference(a.metric(), b.metric(), found, len(a.values))


def paired_mean_difference(pairs: Sequence[tuple[Items, Items]], *, times: int = 10_000, seed: int = 0) -> Difference:
    """The same for the mean of several metrics; each task's items are drawn on their own."""
    total = np.zeros(times)
    for number, (a, b) in enumerate(pairs):
        draws = resamples(len(a.values), times, seed + 1000 * (number + 1))
        total += np.concatenate([b.resampled(counts) - a.resampled(counts) for counts in draws]) / len(pairs)
    mean_a = sum(a.metric() for a, _ in pairs) / len(pairs)
    mean_b = sum(b.metric() for _, b in pairs) / len(pairs)
    return _difference(mean_a, mean_b, total, sum(len(a.values) for a, _ in pairs))


def _difference(a: float, b: float, found: Array, num_items: int) -> Difference:
    low, high = np.quantile(found, [0.025, 0.975])
    below, above = float((found <= 0).mean()), float((found >= 0).mean())
    return Difference(a, b, float(low), float(high), min(1.0, 2 * min(below, above)), num_items)


def _combine(kind: str, total: Any, weight: Any) -> Any:
    ratio = total / weight
    if kind == "mean":
        return ratio
    if kind == "bits":
        return -ratio / math.log(2)
    assert kind == "perplexity"
    with np.errstate(over="ignore"):
        return np.exp(-ratio)


def write_items(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """One JSON object an item, the whole file at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(dumps(record) + "\n" for record in records).encode())


def read_items(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the items of a finished task belong to it; evaluate it again")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def metric_items(records: Sequence[dict[str, Any]], metric: str) -> Items:
    """The metric of items as :func:`write_items` keeps them."""
    if metric in ("acc", "acc_norm"):
        values = np.array([float(r[metric]) for r in records])
        return Items("mean", values, np.ones(len(values)))
    values = np.array([float(r["log_prob"]) for r in records])
    if metric == "perplexity":  # LAMBADA: per passage
        return Items("perplexity", values, np.ones(len(values)))
    weight = "words" if metric == "word_perplexity" else "bytes"
    kind = "bits" if metric == "bits_per_byte" else "perplexity"
    return Items(kind, values, np.array([float(r[weight]) for r in records]))
