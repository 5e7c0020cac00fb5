"""The paper's claims about learning rates, (c), (d) and (e), judged from rows; and the terminal's summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from efla.experiments.smnist import select
from efla.experiments.smnist.claims import PAIRS
from efla.experiments.smnist.select import Setting
from efla.runs.records import Record
from efla.runs.statistics import (
    NOT_JUDGED,
    NOT_SEEN,
    REVERSED,
    SEEN,
    Claim,
    Spread,
    claims_text,
    effect,
    judge,
)

_SMALLEST, _LARGE, _LARGEST = 1e-4, 3e-3, 1e-2


def claims(rows: Sequence[Record], block: str = "bare") -> list[Claim]:
    """Claims (c), (d), (e) for both pairs, as far as the rates they speak of were run."""
    rates = select.rates_of(rows, block)
    found = []
    for other, pair in PAIRS.items():
        arms = select.arms_of(select.runs(rows))
        if "exact-flow" not in arms or other not in arms:
            continue
        if _SMALLEST in rates:
            found.append(_at_the_smallest_rate(rows, block, other, pair))
        if len(rates) > 1:
            found.append(_as_the_rate_grows(rows, block, other, pair, rates))
        if _LARGE in rates and _LARGEST in rates:
            found.append(_at_the_largest_rate(rows, block, other, pair, rates))
    return sorted(found, key=lambda claim: claim.letter)


def _at_the_smallest_rate(rows: Sequence[Record], block: str, other: str, pair: str) -> Claim:
    at = Setting(block, _SMALLEST)
    ours, theirs = (select.run_spread(rows, at, arm, "clean_accuracy") for arm in ("exact-flow", other))
    our_loss, their_loss = (select.run_spread(rows, at, arm, "final_loss") for arm in ("exact-flow", other))
    numbers = (
        f"accuracy {ours.percent()} against {theirs.percent()}; "
        f"final training loss {our_loss.text(1, 3)} against {their_loss.text(1, 3)}; {_seeds(ours, theirs)}"
    )
    sentence = "At rate 1e-4 both have a high training loss, yet EFLA is clearly more accurate"
    return Claim("c", sentence, pair, judge(ours, theirs), numbers, effect(ours, theirs))


def _as_the_rate_grows(rows: Sequence[Record], block: str, other: str, pair: str, rates: Sequence[float]) -> Claim:
    """Stated for all rates: seen (or reversed) only if it is so in loss and in accuracy at every rate above the smallest."""
    each: Counter[tuple[str, str]] = Counter()
    numbers = []
    smallest_n = 99
    for rate in rates[1:]:
        values = {}
        for field, lower in (("final_loss", True), ("clean_accuracy", False)):
            ours, theirs = (select.run_spread(rows, Setting(block, rate), arm, field) for arm in ("exact-flow", other))
            each[field, judge(ours, theirs, lower_is_better=lower)] += 1
            values[field] = (ours, theirs)
            smallest_n = min(smallest_n, ours.n, theirs.n)
        (a, b), (c, d) = values["final_loss"], values["clean_accuracy"]
        numbers.append(
            f"{rate:g}: loss {a.text(1, 3)} against {b.text(1, 3)}, accuracy {c.percent()} against {d.percent()}"
        )
    verdicts = {verdict for _, verdict in each}
    verdict = NOT_JUDGED if NOT_JUDGED in verdicts else verdicts.pop() if len(verdicts) == 1 else NOT_SEEN
    count = "" if verdict == NOT_JUDGED else (
        f"loss lower at {each['final_loss', SEEN]}, higher at {each['final_loss', REVERSED]}, accuracy higher at "
        f"{each['clean_accuracy', SEEN]}, lower at {each['clean_accuracy', REVERSED]} of {len(rates) - 1} rates; "
    )  # fmt: skip
    sentence = "EFLA has lower loss and higher accuracy as the rate grows"
    return Claim("d", sentence, pair, verdict, f"{count}{'; '.join(numbers)}; {_count(smallest_n)}")


def _at_the_largest_rate(rows: Sequence[Record], block: str, other: str, pair: str, rates: Sequence[float]) -> Claim:
    """Seen if EFLA is best at 1e-2 and gains on 3e-3 while the delta rule does not; reversed if the roles are swapped."""
    curves = {
        arm: {rate: select.run_spread(rows, Setting(block, rate), arm, "clean_accuracy") for rate in rates}
        for arm in ("exact-flow", other)
    }
    gains = {arm: judge(curve[_LARGEST], curve[_LARGE]) == SEEN for arm, curve in curves.items()}
    best = {arm: max(curve, key=lambda rate: curve[rate].mean) for arm, curve in curves.items()}
    smallest = min(point.n for curve in curves.values() for point in curve.values())
    if smallest < 2:
        verdict = NOT_JUDGED
    elif gains["exact-flow"] and best["exact-flow"] == _LARGEST and not gains[other]:
        verdict = SEEN
    elif gains[other] and best[other] == _LARGEST and not gains["exact-flow"]:
        verdict = REVERSED
    else:
        verdict = NOT_SEEN
    numbers = "; ".join(
        f"{arm}: {curve[_LARGE].percent()} at 3e-3, {curve[_LARGEST].percent()} at 1e-2, best at {best[arm]:g}"
        for arm, curve in curves.items()
    )
    sentence = "From 3e-3 to 1e-2 the delta rule stops improving while EFLA reaches its best"
    return Claim("e", sentence, pair, verdict, f"{numbers}; {_count(smallest)}")


def text_summary(rows: Sequence[Record]) -> str:
    """Final loss and clean accuracy per arm and rate, and the claims, as plain text."""
    rates = select.rates_of(rows)
    lines = []
    for field, title, unit, digits in (
        ("final_loss", "final training loss", 1, 3),
        ("clean_accuracy", "clean accuracy, %", 100, 1),
    ):
        lines.append(f"{title:<19}" + "".join(f"{rate:>16g}" for rate in rates))
        for arm in select.arms_of(select.runs(rows)):
            points = [select.run_spread(rows, Setting("bare", rate), arm, field) for rate in rates]
            if any(point.n for point in points):
                lines.append(f"    {arm:<15}" + "".join(f"{point.text(unit, digits):>16}" for point in points))
    lines += claims_text(claims(rows))
    data = sorted({row["data"]["description"] for row in select.runs(rows)})
    return "\n".join([*lines, "", *(f"data: {description}" for description in data)])


def _seeds(*spreads: Spread) -> str:
    return _count(min(item.n for item in spreads))


def _count(n: int) -> str:
    return "1 seed: no verdict" if n == 1 else f"{n} seeds"
