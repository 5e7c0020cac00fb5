"""Numbers of the sequential MNIST rows over seeds, the paper's claims about them, and the summaries of the terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from efla.experiments.smnist.config import ARMS
from efla.runs.records import Record, number
from efla.runs.statistics import (
    NOT_JUDGED,
    NOT_SEEN,
    REVERSED,
    SEEN,
    Claim,
    Curve,
    Rows,
    Spread,
    claims_text,
    effect,
    judge,
    level_mean,
    spread,
)

PAIRS = {
    "delta-raw": "exact-flow against delta-raw (the paper's argument: the rule alone differs)",
    "delta-l2": "exact-flow against delta-l2 (practice: DeltaNet as in flash-linear-attention)",
}
_SENTENCES = {
    "scale": ("a", "Accuracy under the delta rule falls rapidly as the intensity grows, EFLA's stays higher"),
    "noise": ("b", "EFLA degrades more slowly under Gaussian noise"),
    "dropout": ("b", "EFLA degrades more slowly under pixel dropout"),
}
_SMALLEST, _LARGE, _LARGEST = 1e-4, 3e-3, 1e-2


class Condition(NamedTuple):
    """A block and a rate: what is equal when arms are compared."""

    block: str
    rate: float


def arms_of(rows: Sequence[Record]) -> list[str]:
    """Arms in the rows, in the order of the config."""
    return Rows(rows).values("arm", order=ARMS)


def conditions_of(rows: Sequence[Record]) -> list[Condition]:
    """Conditions that were tested on corrupted images: bare first, larger rates first."""
    found = {Condition(row["block"], row["rate"]) for row in Rows(rows).where(row="level")}
    return sorted(found, key=lambda at: (at.block != "bare", at.block, -at.rate))


def rates_of(rows: Sequence[Record], block: str = "bare") -> list[float]:
    """Rates at which a block was trained, ascending."""
    return Rows(rows).cells().where(block=block).values("rate")


def runs_of(rows: Sequence[Record], at: Condition, arm: str) -> Rows:
    """The training runs of an arm, one row each."""
    return Rows(rows).cells().where(arm=arm, **at._asdict())


def levels_of(rows: Sequence[Record], at: Condition, arm: str, kind: str) -> Rows:
    """The tests of an arm under a kind of corruption, one row a level and seed."""
    return Rows(rows).where(row="level", kind=kind, arm=arm, **at._asdict())


def kind_mean(rows: Sequence[Record], at: Condition, arm: str, kind: str) -> Spread:
    """The mean accuracy over levels (trapezoid on the index), over seeds."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for row in levels_of(rows, at, arm, kind):
        by_seed.setdefault(row["seed"], []).append((row["level"], number(row["accuracy"])))
    return spread(level_mean([accuracy for _, accuracy in sorted(points)]) for points in by_seed.values())


def loss_curve(rows: Sequence[Record], at: Condition, arm: str, window: int = 20) -> Curve:
    """Training loss against the step, smoothed with a trailing window, over the seeds that got that far."""
    curves = []
    for row in runs_of(rows, at, arm):
        losses = [number(loss) for loss in row["losses"]]
        windows = (losses[max(0, end - window) : end] for end in range(1, len(losses) + 1))
        curves.append([sum(values) / len(values) for values in windows])
    length = min(map(len, curves), default=0)
    steps = sorted({*range(0, length, max(1, length // 100)), length - 1} - {-1})
    return [step + 1 for step in steps], [spread(curve[step] for curve in curves) for step in steps]


def corruption_claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) and (b) for every condition and both pairs. The verdict is on the mean over levels."""
    found = []
    for kind, (letter, sentence) in _SENTENCES.items():
        for at in conditions_of(rows):
            for other in PAIRS:
                claim = _claim(rows, at, kind, letter, sentence, other)
                if claim is not None:
                    found.append(claim)
    return found


def _claim(rows: Sequence[Record], at: Condition, kind: str, letter: str, sentence: str, other: str) -> Claim | None:
    ours = kind_mean(rows, at, "exact-flow", kind)
    theirs = kind_mean(rows, at, other, kind)
    if ours.n == 0 or theirs.n == 0:
        return None
    verdict = judge(ours, theirs)
    levels, our_curve = levels_of(rows, at, "exact-flow", kind).curve("level", "accuracy")
    _, their_curve = levels_of(rows, at, other, kind).curve("level", "accuracy")
    each = Counter(judge(a, b) for a, b in zip(our_curve[1:], their_curve[1:], strict=False))
    difference = 100 * (ours.mean - theirs.mean)
    largest = 100 * max(ours.std, theirs.std)
    by = f"{difference:+.1f}" if verdict == NOT_JUDGED else f"{difference:+.1f} ± {largest:.1f}"
    numbers = (
        f"mean accuracy over levels {ours.percent()} against {theirs.percent()}: {by} points, "
        f"{min(ours.n, theirs.n)} seed{'s' if min(ours.n, theirs.n) > 1 else ''}; "
    )
    if verdict == NOT_JUDGED:
        ahead = sum(a.mean > b.mean for a, b in zip(our_curve[1:], their_curve[1:], strict=False))
        numbers += f"ahead at {ahead} of {len(levels) - 1} levels (one seed: no verdict)"
    else:
        numbers += f"of {len(levels) - 1} levels: seen at {each[SEEN]}, not seen at {each[NOT_SEEN]}, "
        numbers += f"reversed at {each[REVERSED]}"
    for arm in ("exact-flow", other):
        chosen = runs_of(rows, at, arm)
        diverged = sum(bool(row["diverged"]) for row in chosen)
        if diverged:
            numbers += f"; {arm} diverged in training in {diverged} of {len(chosen)} runs"
    pair = f"{PAIRS[other]}; {at.block} block, rate {at.rate:g}"
    return Claim(letter, sentence, pair, verdict, numbers, effect=effect(ours, theirs))


def text_summary(rows: Sequence[Record]) -> str:
    """Accuracy in percent per arm and level, and claims (a) and (b), as plain text."""
    lines: list[str] = []
    for at in conditions_of(rows):
        lines.append(f"{at.block} block, rate {at.rate:g}: accuracy in %, mean over seeds")
        for kind in ("scale", "dropout", "noise"):
            lines += _table(rows, at, kind)
        lines.append("")
    lines += claims_text(corruption_claims(rows))
    return "\n".join([*lines, "", *_data_lines(rows)])


def _table(rows: Sequence[Record], at: Condition, kind: str) -> list[str]:
    lines: list[str] = []
    for arm in arms_of(rows):
        levels, curve = levels_of(rows, at, arm, kind).curve("level", "accuracy")
        if not levels:
            continue
        if not lines:
            lines.append(f"  {kind:<17}" + "".join(f"{level:>7g}" for level in levels))
        lines.append(f"    {arm:<15}" + "".join(f"{100 * point.mean:7.1f}" for point in curve))
    return lines


def rate_claims(rows: Sequence[Record], block: str = "bare") -> list[Claim]:
    """Claims (c), (d) and (e) for both pairs, if the rates they are about were run."""
    rates = rates_of(rows, block)
    found = []
    for other, pair in PAIRS.items():
        arms = arms_of(Rows(rows).cells())
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
    at = Condition(block, _SMALLEST)
    ours, theirs = (runs_of(rows, at, arm).spread("clean_accuracy") for arm in ("exact-flow", other))
    our_loss, their_loss = (runs_of(rows, at, arm).spread("final_loss") for arm in ("exact-flow", other))
    numbers = (
        f"accuracy {ours.percent()} against {theirs.percent()}; "
        f"final training loss {our_loss.text(1, 3)} against {their_loss.text(1, 3)}; {_seeds(ours, theirs)}"
    )
    sentence = "At rate 1e-4 both have a high training loss, yet EFLA is clearly more accurate"
    return Claim("c", sentence, pair, judge(ours, theirs), numbers, effect=effect(ours, theirs))


def _as_the_rate_grows(rows: Sequence[Record], block: str, other: str, pair: str, rates: Sequence[float]) -> Claim:
    """Seen (or reversed) only if loss and accuracy both say so at every rate above the smallest."""
    each: Counter[tuple[str, str]] = Counter()
    numbers = []
    smallest_n = 99
    for rate in rates[1:]:
        values = {}
        for field, lower in (("final_loss", True), ("clean_accuracy", False)):
            ours, theirs = (runs_of(rows, Condition(block, rate), arm).spread(field) for arm in ("exact-flow", other))
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
    """Seen if EFLA is best at 1e-2 and improves over 3e-3 while the delta rule does not; reversed for the opposite."""
    curves = {
        arm: {rate: runs_of(rows, Condition(block, rate), arm).spread("clean_accuracy") for rate in rates}
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


def rates_summary(rows: Sequence[Record]) -> str:
    """Final loss and clean accuracy per arm and rate, and claims (c), (d) and (e), as plain text."""
    rates = rates_of(rows)
    lines = []
    for field, title, unit, digits in (
        ("final_loss", "final training loss", 1, 3),
        ("clean_accuracy", "clean accuracy, %", 100, 1),
    ):
        lines.append(f"{title:<19}" + "".join(f"{rate:>16g}" for rate in rates))
        for arm in arms_of(Rows(rows).cells()):
            points = [runs_of(rows, Condition("bare", rate), arm).spread(field) for rate in rates]
            if any(point.n for point in points):
                lines.append(f"    {arm:<15}" + "".join(f"{point.text(unit, digits):>16}" for point in points))
    lines += claims_text(rate_claims(rows))
    return "\n".join([*lines, "", *_data_lines(rows)])


def _data_lines(rows: Sequence[Record]) -> list[str]:
    return [f"data: {text}" for text in sorted({row["data"]["description"] for row in Rows(rows).cells()})]


def _seeds(*spreads: Spread) -> str:
    return _count(min(item.n for item in spreads))


def _count(n: int) -> str:
    return "1 seed: no verdict" if n == 1 else f"{n} seeds"
