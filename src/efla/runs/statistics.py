"""Means over seeds with their spread, selection of rows, and the rule that decides whether a claim is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from efla.runs.records import Record, number


class Spread(NamedTuple):
    """Mean and standard deviation over seeds (n - 1 in the denominator; not-a-number for one seed)."""

    mean: float
    std: float
    n: int
    values: tuple[float, ...] = ()
    """The value of each seed, not-a-number for one that diverged."""

    def text(self, unit: float = 1.0, digits: int = 1) -> str:
        """``81.2 ± 0.4``; one seed has no ±."""
        if self.n and math.isnan(self.mean):
            return "not finite"
        if self.n == 0:
            return "–"  # noqa: RUF001
        spread = "" if self.n < 2 else f" ± {self.std * unit:.{digits}f}"
        return f"{self.mean * unit:.{digits}f}{spread}"

    def percent(self, digits: int = 1) -> str:
        """A share as ``81.2 ± 0.4 %``."""
        text = self.text(100, digits)
        return text if math.isnan(self.mean) else f"{text} %"


def spread(values: Iterable[float]) -> Spread:
    """Mean and standard deviation of the values; both are not-a-number if a value is not finite."""
    each = tuple(values)
    array = np.asarray(each, dtype=np.float64)
    if len(array) == 0 or not np.isfinite(array).all():
        return Spread(math.nan, math.nan, len(array), each)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else math.nan, len(array), each)


Curve = tuple[list[Any], list[Spread]]
"""Values of x in ascending order, and the spread of y at each."""


def curve(points: Iterable[tuple[Any, float]]) -> Curve:
    """The spread of y at each distinct x of some (x, y)."""
    found: dict[Any, list[float]] = {}
    for x, y in points:
        found.setdefault(x, []).append(y)
    return sorted(found), [spread(found[x]) for x in sorted(found)]


class Rows(list[Record]):
    """Rows with selection: ``Rows(rows).cells().where(arm="exact-flow", rate=1e-3).spread("final_loss")``."""

    def where(self, **values: object) -> Rows:
        """The rows whose fields have these values."""
        return Rows(row for row in self if all(key in row and row[key] == value for key, value in values.items()))

    def cells(self) -> Rows:
        """The rows that summarise a cell."""
        return self.where(row="cell")

    def values(self, field: str, order: Iterable[Any] | None = None) -> list[Any]:
        """The distinct values of a field, ascending or in the given order; rows without it are ignored."""
        found = {row[field] for row in self if field in row}
        return sorted(found) if order is None else [value for value in order if value in found]

    def spread(self, field: str | Callable[[Record], float]) -> Spread:
        """Mean and standard deviation of a field, or of a function of the row."""
        return spread(_value(row, field) for row in self)

    def curve(self, x: str, y: str | Callable[[Record], float]) -> Curve:
        """The spread of y, a field or a function of the row, at each value of the field x."""
        return curve((row[x], _value(row, y)) for row in self)


def _value(row: Record, field: str | Callable[[Record], float]) -> float:
    return number(row[field]) if isinstance(field, str) else field(row)


def level_mean(values: Sequence[float]) -> float:
    """Mean over levels, trapezoid on the level's index: (v_0/2 + v_1 + ... + v_n/2) / n."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        raise ValueError(f"a mean over levels needs at least two levels, got {len(array)}")
    return float((array[:-1] + array[1:]).sum() / (2 * (len(array) - 1)))


SEEN, NOT_SEEN, REVERSED, NOT_JUDGED = "seen", "not seen", "reversed", "not judged"


def judge(ours: Spread, theirs: Spread, *, lower_is_better: bool = False) -> str:
    """Whether ours is better: "seen" if the means differ by more than the larger standard deviation, "reversed" if they
    do so in the other direction, else "not seen"; "not judged" with fewer than two seeds."""
    if ours.n < 2 or theirs.n < 2:
        return NOT_JUDGED
    if math.isnan(ours.mean) or math.isnan(theirs.mean):
        # A diverged run has no loss: the arm without one is worse.
        if math.isnan(ours.mean) and math.isnan(theirs.mean):
            return NOT_SEEN
        return REVERSED if math.isnan(ours.mean) else SEEN
    difference = (theirs.mean - ours.mean) if lower_is_better else (ours.mean - theirs.mean)
    if abs(difference) <= max(ours.std, theirs.std):
        return NOT_SEEN
    return SEEN if difference > 0 else REVERSED


def effect(ours: Spread, theirs: Spread, *, lower_is_better: bool = False) -> float | None:
    """By how many of the larger standard deviations ours is better (negative: worse); ``None`` without a verdict."""
    if judge(ours, theirs) == NOT_JUDGED or math.isnan(ours.mean) or math.isnan(theirs.mean):
        return None
    difference = (theirs.mean - ours.mean) if lower_is_better else (ours.mean - theirs.mean)
    larger = max(ours.std, theirs.std)
    return difference / larger if larger > 0 else math.copysign(math.inf, difference) if difference else 0.0


class Claim(NamedTuple):
    """A sentence of the paper for one pair of arms, the verdict and its numbers.

    Claims with the same letter and sentence are comparisons of one claim, the most important one first.
    """

    letter: str
    sentence: str
    pair: str
    verdict: str
    numbers: str
    effect: float | None = None
    """The :func:`effect` of a comparison of two means."""


def grouped(claims: Sequence[Claim]) -> list[tuple[Claim, list[Claim]]]:
    """Claims by sentence: the first of each, and all its comparisons."""
    found: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        found.setdefault((claim.letter, claim.sentence), []).append(claim)
    return [(comparisons[0], comparisons) for comparisons in found.values()]


def claims_text(claims: Sequence[Claim]) -> list[str]:
    """The claims as lines for a terminal."""
    lines = []
    for first, comparisons in grouped(claims):
        lines.append(f"({first.letter}) {first.sentence}")
        lines += [
            f"    {claim.verdict.upper():<10}  {claim.pair}\n                {claim.numbers}" for claim in comparisons
        ]
    return lines
