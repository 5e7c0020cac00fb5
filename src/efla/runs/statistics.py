"""Means over seeds with their spread, selection of rows, paired differences, and the verdicts on the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from efla.runs.records import Record, number

MISSING = "–"  # noqa: RUF001
"""What tables show where there is no value."""


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
            return MISSING
        spread = "" if self.n < 2 else f" ± {self.std * unit:.{digits}f}"
        return f"{self.mean * unit:.{digits}f}{spread}"


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

    def spread(self, field: str) -> Spread:
        """Mean and standard deviation of a field."""
        return spread(number(row[field]) for row in self)

    def curve(self, x: str, y: str) -> Curve:
        """The spread of the field y at each value of the field x."""
        return curve((row[x], number(row[y])) for row in self)


SEEN, NOT_SEEN, REVERSED = "seen", "not seen", "reversed"
NOT_JUDGED, NOT_TESTABLE = "not judged", "not testable here"
_ALPHA = 0.05


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Quantile, at least the median, of Student's t distribution with a whole number of degrees of freedom.

    With theta = atan(t / sqrt(freedom)) the distribution function is a finite sum in sin and cos of theta; theta is found
    by bisection.
    """
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"expected 0.5 <= probability < 1 and freedom >= 1, got {probability} and {freedom}")

    def distribution(theta: float) -> float:
        odd = freedom % 2
        term, total = math.cos(theta) if odd else 1.0, 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= math.cos(theta) ** 2 * k / (k + 1)
        inside = math.sin(theta) * total
        return 0.5 + (theta + inside) / math.pi if odd else 0.5 + inside / 2

    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


class Difference(NamedTuple):
    """Paired differences over seeds, positive in the direction of the claim: their mean and 95 % interval.

    The interval is mean ± t sd / sqrt(n) with Student's t; not-a-number for one pair. If an arm diverged on a seed, there is
    no mean and no interval: the pair counts as won by the arm that is finite, and a sign test judges.
    """

    mean: float
    low: float
    high: float
    n: int
    won: int = 0
    """Pairs in favour of the claim; ``lost``: against it."""
    lost: int = 0

    @property
    def detectable(self) -> float:
        """The smallest mean difference that these pairs could have shown: half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def verdict(self) -> str:
        """Seen if the interval is above zero, reversed if it is below, else not seen; not judged below two pairs."""
        if self.n < 2:
            return NOT_JUDGED
        if math.isnan(self.mean):
            return (
                SEEN if _sign_test(self.won, self.lost) else REVERSED if _sign_test(self.lost, self.won) else NOT_SEEN
            )
        return SEEN if self.low > 0 else REVERSED if self.high < 0 else NOT_SEEN

    def seeds_needed(self, size: float | None = None) -> int | None:
        """About how many seeds show a difference of this size, by default the observed one, with a probability of 80 %.

        The smallest n with (t_{0.975} + t_{0.8}) sd / sqrt(n) <= size, t with n - 1 degrees of freedom and sd as observed;
        ``None`` if it is unknown or above 1,000.
        """
        size = abs(self.mean if size is None else size)
        if self.n < 2 or math.isnan(self.mean) or size == 0:
            return None
        sd = self.detectable * math.sqrt(self.n) / t_quantile(1 - _ALPHA / 2, self.n - 1)
        if (1.95 + 0.84) * sd > size * math.sqrt(1000):
            return None
        n = max(2, math.floor(((1.95 + 0.84) * sd / size) ** 2))
        while (t_quantile(1 - _ALPHA / 2, n - 1) + t_quantile(0.8, n - 1)) * sd > size * math.sqrt(n):
            n += 1
        return n

    def text(self, unit: str = "", *, short: bool = False) -> str:
        """``+1.2 points [-0.4, +2.8], n = 5, detectable 1.6``: two digits of the interval's half width, one to four decimals;
        short: without the last part."""
        unit = f" {unit}" if unit else ""
        if self.n == 0:
            return "no pairs"
        if math.isnan(self.mean):
            return f"won {self.won}, lost {self.lost} of {self.n} pairs (sign test)"
        width = abs(self.mean if math.isnan(self.detectable) else self.detectable)
        digits = min(4, max(1, 1 - math.floor(math.log10(width)))) if width else 1
        if self.n == 1:
            return f"{self.mean:+.{digits}f}{unit}, n = 1"
        found = f"{self.mean:+.{digits}f}{unit} [{self.low:+.{digits}f}, {self.high:+.{digits}f}], n = {self.n}"
        return found if short else f"{found}, detectable {self.detectable:.{digits}f}"


def _sign_test(won: int, lost: int) -> bool:
    """Whether as many wins or more have a probability of at most 2.5 % if either arm wins a pair as easily."""
    pairs = won + lost
    return sum(math.comb(pairs, wins) for wins in range(won, pairs + 1)) <= _ALPHA / 2 * 2**pairs


def difference(values: Iterable[float]) -> Difference:
    """The :class:`Difference` of values that are differences already, positive in the direction of the claim.

    Infinities are pairs in which one arm has no finite value; not-a-number, pairs in which neither has, count for neither.
    """
    array = np.asarray(list(values), dtype=np.float64)
    n, won, lost = len(array), int((array > 0).sum()), int((array < 0).sum())
    if n == 0 or not np.isfinite(array).all():
        return Difference(math.nan, math.nan, math.nan, n, won, lost)
    mean = float(array.mean())
    if n == 1:
        return Difference(mean, math.nan, math.nan, n, won, lost)
    half = t_quantile(1 - _ALPHA / 2, n - 1) * float(array.std(ddof=1)) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n, won, lost)


Values = Mapping[Any, float]
"""Seed -> value of an arm."""


def advantages(
    ours: Values, theirs: Values, *, lower_is_better: bool = False, relative: bool = False
) -> dict[Any, float]:
    """Seed -> by how much ours is better, for the seeds of both; relative: in percent of theirs.

    A value that is not finite is that of a run that diverged: infinite advantage of the other arm.
    """
    found = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = ours[seed], theirs[seed]
        if math.isfinite(a) and math.isfinite(b):
            size = (b - a) if lower_is_better else (a - b)
            found[seed] = 100 * size / b if relative else size
        else:
            found[seed] = math.inf if math.isfinite(a) else -math.inf if math.isfinite(b) else math.nan
    return found


class Claim(NamedTuple):
    """A sentence of the paper, one comparison that tests it, the verdict and its reason.

    Claims with the same letter and sentence are comparisons of one claim, the most important one first.
    """

    letter: str
    sentence: str
    pair: str
    """What is compared, in a few words."""
    verdict: str
    reason: str
    """Why, in one short line."""
    difference: Difference | None = None
    """Positive in the direction of the claim; ``None`` where nothing is random."""
    unit: str = ""
    """Of the difference."""
    paper: float | None = None
    """The difference that the paper printed, in the same unit and direction."""

    def text(self) -> str:
        """Difference, interval, n, smallest detectable effect and reason on one line."""
        return "; ".join(filter(None, (self.difference and self.difference.text(self.unit), self.reason)))


def compare(
    letter: str,
    sentence: str,
    pair: str,
    ours: Values,
    theirs: Values,
    *,
    unit: str,
    scale: float = 1.0,
    digits: int = 1,
    lower_is_better: bool = False,
    relative: bool = False,
    paper: float | None = None,
    note: str = "",
) -> Claim:
    """The claim that ours is better than theirs, judged by the paired differences over the seeds of both.

    scale: factor of the values and of a difference that is not relative; digits: of the values in the reason. Where the
    verdict is "not seen", the reason says about how many seeds would show the paper's difference, else the observed one.
    """
    each = advantages(ours, theirs, lower_is_better=lower_is_better, relative=relative)
    found = difference(value if relative else scale * value for value in each.values())
    means = (spread(arm[seed] for seed in each).mean for arm in (ours, theirs))
    shown = ("diverged" if math.isnan(mean) else f"{scale * mean:,.{digits}f}" for mean in means)
    parts = [" against ".join(shown) if each else "no seed of both arms", note]
    if found.verdict == NOT_SEEN and not math.isnan(found.mean):
        seeds = found.seeds_needed(paper)
        parts.append(f"needs {'more than 1,000' if seeds is None else f'about {seeds}'} seeds")
    if unpaired := len(ours.keys() ^ theirs.keys()):
        parts.append(f"{unpaired} unpaired seed{'s' if unpaired > 1 else ''} left out")
    return Claim(letter, sentence, pair, found.verdict, "; ".join(filter(None, parts)), found, unit, paper)


def every(differences: Sequence[Difference]) -> tuple[str, Difference]:
    """The verdict on a claim that must hold in several comparisons, and the one furthest from it.

    Seen if each of them is seen (so its error rate is at most that of one), reversed if each is reversed.
    """
    verdicts = {found.verdict for found in differences}
    weakest = min(differences, key=lambda found: -math.inf if math.isnan(found.low) else found.low)
    if NOT_JUDGED in verdicts:
        return NOT_JUDGED, weakest
    return verdicts.pop() if verdicts in ({SEEN}, {REVERSED}) else NOT_SEEN, weakest


def compare_all(
    letter: str, sentence: str, pair: str, each: Mapping[str, Difference], *, unit: str, kind: str, label: str = ""
) -> Claim:
    """The claim that must hold in :func:`every` comparison, by name, with the difference furthest from it.

    kind: what the comparisons are. label: before the name of the one that is shown.
    """
    verdict, weakest = every(list(each.values()))
    shown = next(name for name, found in each.items() if found is weakest)
    places = {k: ", ".join(name for name, found in each.items() if found.verdict == k) for k in (SEEN, REVERSED)}
    counts = "; ".join(f"{verdict} at {names or f'no {kind}'}" for verdict, names in places.items())
    reason = f"shown: {label}{shown}, furthest from the claim; {counts}"
    return Claim(letter, sentence, pair, verdict, reason, weakest, unit)


def within(found: Difference, margin: float) -> str:
    """The verdict on a claim of no difference: seen if the interval lies within ± margin, reversed if it lies outside."""
    if found.n < 2 or math.isnan(found.mean):
        return NOT_JUDGED
    if -margin < found.low and found.high < margin:
        return SEEN
    return REVERSED if found.low > margin or found.high < -margin else NOT_SEEN


def grouped(claims: Sequence[Claim]) -> list[tuple[Claim, list[Claim]]]:
    """Claims by sentence: the first of each, and all its comparisons."""
    found: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        found.setdefault((claim.letter, claim.sentence), []).append(claim)
    return [(comparisons[0], comparisons) for comparisons in found.values()]
