"""Numbers of the sequential MNIST rows over seeds, the paper's claims about them, and the summaries of the terminal."""

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import NamedTuple

from efla.experiments.smnist.config import ARMS, AUTHORS_RATES, LEVELS
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.statistics import (
    NOT_SEEN,
    REVERSED,
    SEEN,
    Claim,
    Curve,
    Rows,
    advantages,
    compare,
    compare_all,
    difference,
    spread,
)
from efla.runs.text import claims_text, text_table

OURS, MAIN = "exact-flow", "delta-l2"
OTHERS = (MAIN, "delta-raw", "implicit-euler", "crank-nicolson")
"""The arms that EFLA is compared with. The paper's DeltaNet normalises its keys: delta-l2."""
_SENTENCES = {
    "scale": ("a", "DeltaNet's accuracy falls rapidly as the intensity grows, EFLA's stays higher"),
    "noise": ("b", "EFLA degrades more slowly under Gaussian noise"),
    "dropout": ("b", "EFLA degrades more slowly under pixel dropout"),
}
_KINDS = {"scale": "intensity", "noise": "noise", "dropout": "dropout"}
_SIGNS = {"scale": "×", "noise": "σ", "dropout": "p"}  # noqa: RUF001
_LEGEND = "% correct; × intensity, σ noise, p dropout"  # noqa: RUF001
_SMALLEST, _LARGE, _LARGEST = 1e-4, 3e-3, 1e-2
_MOST_LINES = 14
"""Lines of tables in a summary; with the claims and what follows, it fits a terminal of 25 lines."""


class Condition(NamedTuple):
    """A block and a rate: what is equal when arms are compared."""

    block: str
    rate: float


class Comparison(NamedTuple):
    """EFLA under one condition against another arm under another."""

    title: str
    ours: Condition
    arm: str
    theirs: Condition


def arms_of(rows: Sequence[Record]) -> list[str]:
    """Arms in the rows, in the order of the config."""
    return Rows(rows).values("arm", order=ARMS)


def main_block(rows: Sequence[Record]) -> str:
    """The block that the claims are about: the authors' if it was run, else bare; the others are controls."""
    blocks = Rows(rows).values("block")
    return next((block for block in ("authors", "bare", *blocks) if block in blocks), "bare")


def conditions_of(rows: Sequence[Record]) -> list[Condition]:
    """Conditions that were tested on corrupted images: the main block first, larger rates first."""
    found = {Condition(row["block"], row["rate"]) for row in Rows(rows).where(row="level")}
    return sorted(found, key=lambda at: (at.block != main_block(rows), at.block, -at.rate))


def rates_of(rows: Sequence[Record], block: str | None = None) -> list[float]:
    """Rates at which a block, by default the main one, was trained, ascending."""
    return Rows(rows).cells().where(block=block or main_block(rows)).values("rate")


def runs_of(rows: Sequence[Record], at: Condition, arm: str) -> Rows:
    """The training runs of an arm, one row each."""
    return Rows(rows).cells().where(arm=arm, **at._asdict())


def levels_of(rows: Sequence[Record], at: Condition, arm: str, kind: str) -> Rows:
    """The tests of an arm under a kind of corruption, one row a level and seed."""
    return Rows(rows).where(row="level", kind=kind, arm=arm, **at._asdict())


def level_means(levels: Rows, field: str = "accuracy") -> dict[int, float]:
    """Seed -> plain mean accuracy over the corrupted levels of a kind (all but the first, at which images are clean)."""
    corrupted = Rows(row for row in levels if row["level"] != LEVELS[row["kind"]][0])
    return {seed: corrupted.where(seed=seed).spread(field).mean for seed in corrupted.values("seed")}


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


def best_rate(rows: Sequence[Record], block: str, arm: str) -> float | None:
    """The rate with the highest accuracy on training images that the model has not seen yet, over the last tenth of its
    one pass; the test images have no part in the choice."""
    runs = Rows(row for row in Rows(rows).cells().where(block=block, arm=arm) if "accuracy_before_update" in row)
    rates, means = runs.curve("rate", "accuracy_before_update")
    return max(zip(means, rates, strict=True), default=(None, None))[1]


def comparisons(rows: Sequence[Record]) -> Iterator[Comparison]:
    """What is compared: the three comparisons with DeltaNet on the authors' block, then equal conditions."""
    conditions = conditions_of(rows)
    published = [Condition("authors", rate) for rate in AUTHORS_RATES]
    if set(published) <= set(conditions):
        yield Comparison("as published", published[0], MAIN, published[1])
    for at in published:
        yield Comparison(f"both at {at.rate:g}", at, MAIN, at)
    best = [best_rate(rows, "authors", arm) for arm in (OURS, MAIN)]
    if best[0] and best[1] and len(rates_of(rows, "authors")) > 1:
        yield Comparison("best rates", Condition("authors", best[0]), MAIN, Condition("authors", best[1]))
    for at in conditions:
        for arm in OTHERS:
            if (at.block, arm) != ("authors", MAIN):
                where = f"both at {at.rate:g}" if at.block == "authors" else f"{at.block} block, {at.rate:g}"
                yield Comparison(f"{name_of(arm)}, {where}", at, arm, at)


def corruption_claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) and (b): the mean accuracy over the corrupted levels in every comparison."""
    found = (_corruption_claim(rows, kind, each) for kind in _SENTENCES for each in comparisons(rows))
    return [claim for claim in found if claim]


def _corruption_claim(rows: Sequence[Record], kind: str, comparison: Comparison) -> Claim | None:
    """The claim on a kind of corruption; ``None`` if an arm was not tested on it."""
    ours = levels_of(rows, comparison.ours, OURS, kind)
    theirs = levels_of(rows, comparison.theirs, comparison.arm, kind)
    if not (ours and theirs):
        return None
    # Equal image sets: every fifth test image where one of the arms has only those.
    same = ours.values("images") == theirs.values("images")
    field = "accuracy" if same else "accuracy_test2k"
    levels = ours.values("level")[1:]
    pairs = ([_by_seed(arm.where(level=at), field) for arm in (ours, theirs)] for at in levels)
    each = [difference(advantages(*pair).values()) for pair in pairs]
    if max((found.n for found in each), default=0) > 1:
        verdicts = [found.verdict for found in each]
        note = f"of {len(levels)} levels seen at {verdicts.count(SEEN)}, reversed at {verdicts.count(REVERSED)}"
    else:
        note = f"ahead at {sum(found.won for found in each)} of {len(levels)} levels"
    if comparison.ours != comparison.theirs:
        note = f"EFLA at {comparison.ours.rate:g}, DeltaNet at {comparison.theirs.rate:g}; {note}"
    for arm, at in ((OURS, comparison.ours), (comparison.arm, comparison.theirs)):
        runs = runs_of(rows, at, arm)
        if diverged := len(runs.where(diverged=True)):
            note += f"; {name_of(arm)} diverged in {diverged} of {len(runs)} runs"
    return compare(
        *_SENTENCES[kind], f"{_KINDS[kind]}, {comparison.title}", level_means(ours, field), level_means(theirs, field),
        unit="points", scale=100, note=note,
    )  # fmt: skip


def _by_seed(rows: Rows, field: str) -> dict[int, float]:
    return {row["seed"]: number(row[field]) for row in rows}


def rate_claims(rows: Sequence[Record], block: str | None = None) -> list[Claim]:
    """Claims (c), (d) and (e) on a block, by default the main one, if the rates they are about were run."""
    block = block or main_block(rows)
    rates = rates_of(rows, block)
    found = []
    for other in OTHERS[:2]:
        values = {
            (arm, field, rate): _by_seed(runs_of(rows, Condition(block, rate), arm), field)
            for arm in (OURS, other)
            for field in ("clean_accuracy", "final_loss")
            for rate in rates
        }
        shared = [rate for rate in rates if all(values[arm, "final_loss", rate] for arm in (OURS, other))]
        if _SMALLEST in shared:
            found.append(_at_the_smallest_rate(values, other))
        if len(shared) > 1 and _LARGEST in shared:
            found += [_as_the_rate_grows(values, other, shared, field) for field in ("clean_accuracy", "final_loss")]
        if _LARGE in shared and _LARGEST in shared:
            found.append(_at_the_largest_rate(values, other, shared))
    return sorted(found, key=lambda claim: claim.letter)


_Values = dict[tuple[str, str, float], dict[int, float]]


def _at_the_smallest_rate(values: _Values, other: str) -> Claim:
    losses = [spread(values[arm, "final_loss", _SMALLEST].values()).text(1, 2) for arm in (OURS, other)]
    ours, theirs = (values[arm, "clean_accuracy", _SMALLEST] for arm in (OURS, other))
    sentence = "At rate 1e-4 both have a high training loss, yet EFLA is clearly more accurate"
    note = f"final loss {losses[0]} against {losses[1]}"
    return compare("c", sentence, name_of(other), ours, theirs, unit="points", scale=100, note=note)


def _as_the_rate_grows(values: _Values, other: str, rates: Sequence[float], field: str) -> Claim:
    """Seen (or reversed) if it is at every rate above the smallest; the difference is the one furthest from the claim."""
    lower, scale = field == "final_loss", 1 if field == "final_loss" else 100
    each = {}
    for rate in rates[1:]:
        found = advantages(values[OURS, field, rate], values[other, field, rate], lower_is_better=lower)
        each[f"{rate:g}"] = difference(scale * value for value in found.values())
    what, unit = ("loss", "nats") if lower else ("accuracy", "points")
    sentence = "EFLA has lower loss and higher accuracy as the rate grows"
    return compare_all("d", sentence, f"{what}, {name_of(other)}", each, unit=unit, kind="rate", label="rate ")


def _at_the_largest_rate(values: _Values, other: str, rates: Sequence[float]) -> Claim:
    """The difference is EFLA's gain from 3e-3 to 1e-2 minus the other arm's. Seen if it is, EFLA's own gain is seen and its
    best rate is 1e-2; reversed if the difference is."""
    field = "clean_accuracy"
    gains = {arm: advantages(values[arm, field, _LARGEST], values[arm, field, _LARGE]) for arm in (OURS, other)}
    own = {arm: difference(100 * gain for gain in gains[arm].values()) for arm in gains}
    both = difference(100 * gain for gain in advantages(gains[OURS], gains[other]).values())
    best = {arm: max(rates, key=lambda rate: spread(values[arm, field, rate].values()).mean) for arm in gains}
    verdict = both.verdict
    if verdict == SEEN and not (own[OURS].verdict == SEEN and best[OURS] == _LARGEST):
        verdict = NOT_SEEN
    reason = "; ".join(f"{name_of(arm)} gains {own[arm].mean:+.1f} points, best at {best[arm]:g}" for arm in gains)
    sentence = "From 3e-3 to 1e-2 DeltaNet stops improving while EFLA reaches its best"
    return Claim("e", sentence, f"gain, {name_of(other)}", verdict, reason, both, "points")


def text_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """Accuracy in percent by arm and level, and claims (a) and (b), as plain text; verbose: every block and level."""
    lines: list[str] = []
    block = main_block(rows)
    for at in (at for at in conditions_of(rows) if verbose or at.block == block):
        table = _table(rows, at, verbose)
        if lines and not verbose and len(lines) + len(table) > _MOST_LINES:
            lines.append(f"rate {at.rate:g}: with --verbose")
        else:
            lines += [f"{at.block} block, rate {at.rate:g}: {_LEGEND}", *table]
    return "\n".join([*lines, "", *claims_text(corruption_claims(rows), verbose), *_data_lines(rows)])


def _table(rows: Sequence[Record], at: Condition, verbose: bool) -> list[str]:
    """One line an arm: clean, then the levels of each kind (two of each, unless verbose)."""
    tests = Rows(rows).where(row="level", **at._asdict())
    levels = {kind: tests.where(kind=kind).values("level")[1:] for kind in _KINDS}
    if not verbose:
        levels = {
            kind: all_ if len(all_) < 3 else [all_[len(all_) // 4], all_[len(all_) // 2]]
            for kind, all_ in levels.items()
        }
    shown = [(kind, level) for kind in _KINDS for level in levels[kind]]
    columns, lines = ["", "clean", *(f"{_SIGNS[kind]}{level:g}" for kind, level in shown)], []
    for arm in arms_of(tests):
        clean = runs_of(rows, at, arm).spread("clean_accuracy")
        points = [levels_of(rows, at, arm, kind).where(level=level).spread("accuracy") for kind, level in shown]
        lines.append([f"  {name_of(arm)}", *(f"{100 * point.mean:.1f}" for point in (clean, *points))])
    return text_table(columns, lines)


def rates_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """Final loss and clean accuracy per arm and rate, and claims (c), (d) and (e), as plain text."""
    block, rates = main_block(rows), rates_of(rows)
    lines = []
    for field, title, unit, digits in (("final_loss", "final loss", 1, 2), ("clean_accuracy", "accuracy, %", 100, 1)):
        table = []
        for arm in arms_of(Rows(rows).cells().where(block=block)):
            found = [runs_of(rows, Condition(block, rate), arm).spread(field) for rate in rates]
            if verbose or sum(point.n > 0 for point in found) > 1:
                table.append([f"  {name_of(arm)}", *(point.text(unit, digits) for point in found)])
        lines += text_table([title, *(f"{rate:g}" for rate in rates)], table)
    return "\n".join([*lines, "", *claims_text(rate_claims(rows), verbose), *_data_lines(rows)])


def _data_lines(rows: Sequence[Record]) -> list[str]:
    return [fill(f"data: {text}", 80) for text in sorted({row["data"]["description"] for row in Rows(rows).cells()})]
