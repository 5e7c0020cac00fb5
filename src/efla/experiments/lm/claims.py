"""The paper's claims about language models judged from rows, and the terminal's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from efla.experiments.lm import select
from efla.experiments.lm.config import PAIR
from efla.experiments.lm.select import METRICS
from efla.runs.records import Record
from efla.runs.statistics import NOT_JUDGED, Claim, Spread, claims_text, effect, judge

COMPARABILITY = (
    "These models have 200 to 800 times fewer parameters than the paper's 340M, saw a thousandth of the tokens or less, and "
    "other text: only signs may be compared."
)
_MAIN = "exact-flow against delta-l2 (DeltaNet as in flash-linear-attention; rule and key norm differ)"
_A = "EFLA has a lower perplexity than DeltaNet at the same size and budget"
_B = "Gated EFLA has a lower perplexity than Gated DeltaNet"
_C = "EFLA is competitive with Mamba-2"
_D = "EFLA's zero-shot accuracy is higher on average"


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) to (d), as far as the arms they speak of were run."""
    arms = set(select.arms_of(rows))
    found: list[Claim] = []
    if {*PAIR} <= arms:
        found += [_compare(rows, "a", _A, "exact-flow", "delta-l2", _MAIN, name) for name in _perplexities(rows, *PAIR)]
    if {"exact-flow", "delta-raw"} <= arms:
        found.append(_compare(rows, "a", _A, "exact-flow", "delta-raw", "the rule alone, raw keys", "bits"))
    if {"exact-flow-l2", "delta-l2"} <= arms:
        found.append(_compare(rows, "a", _A, "exact-flow-l2", "delta-l2", "the rule alone, L2 keys", "bits"))
    if {"gated-exact-flow", "gated-delta"} <= arms:
        pair = "gated-exact-flow against gated-delta (rule and key norm differ)"
        names = _perplexities(rows, "gated-delta", "gated-exact-flow")
        found += [_compare(rows, "b", _B, "gated-exact-flow", "gated-delta", pair, name) for name in names]
    if {"exact-flow", "mamba2"} <= arms:
        found.append(_compare(rows, "c", _C, "exact-flow", "mamba2", "exact-flow against mamba2", "bits"))
    if {*PAIR} <= arms and select.over_seeds(rows, "exact-flow", "lambada_accuracy").n:
        found.append(_one_of_nine(_compare(rows, "d", _D, "exact-flow", "delta-l2", _MAIN, "lambada_accuracy")))
        at_chance = chance_sentence(rows)
        if at_chance:
            found.append(Claim("d", _D, "the eight multiple-choice sets", NOT_JUDGED, at_chance))
    return found


def _one_of_nine(claim: Claim) -> Claim:
    """Without a verdict: one set says nothing about the average, and at this size LAMBADA's last words are rarely hit."""
    return claim._replace(verdict=NOT_JUDGED, numbers=f"{claim.numbers}; one of nine sets", effect=None)


def chance_sentence(rows: Sequence[Record]) -> str:
    """How many multiple-choice accuracies cannot be told from chance."""
    near, total = 0, 0
    for arm in select.arms_of(rows):
        for task, column in select.CHOICES.items():
            found = select.choice(rows, arm, task)
            if found is None or column.chance is None:
                continue
            chance = column.chance / 100
            total += 1
            near += abs(found[0] - chance) <= 2 * math.sqrt(chance * (1 - chance) / found[1])
    if not total:
        return ""
    return (
        f"{near} of {total} accuracies (all arms, one seed) lie within two standard errors of chance: a test of the scorer, "
        "not averaged into a claim"
    )


def _perplexities(rows: Sequence[Record], *arms: str) -> list[str]:
    names = ("bits", "wikitext", "lambada_perplexity")
    return [name for name in names if all(select.over_seeds(rows, arm, name).n for arm in arms)]


def _compare(rows: Sequence[Record], letter: str, sentence: str, ours: str, theirs: str, pair: str, name: str) -> Claim:
    metric = METRICS[name]
    a = select.over_seeds(rows, ours, name, shared_with=theirs)
    b = select.over_seeds(rows, theirs, name, shared_with=ours)
    lower = metric.lower_is_better
    text = f"{select.text(a, metric)} against {select.text(b, metric)}"
    difference = metric.unit * (a.mean - b.mean)
    if not math.isnan(difference):
        text += f": {difference:+,.{metric.digits}f}"
        if not lower or b.mean <= 0:
            text += " points" if metric.unit == 100 else ""
        else:
            text += f" ({100 * (a.mean / b.mean - 1):+.1f} %)"
    text += f"; {_seeds(a)}"
    verdict = judge(a, b, lower_is_better=lower)
    if verdict == NOT_JUDGED and not math.isnan(difference):
        text += _against_the_pair(rows, name, difference / metric.unit)
    return Claim(letter, sentence, f"{metric.title}: {pair}", verdict, text, effect(a, b, lower_is_better=lower))


def _against_the_pair(rows: Sequence[Record], name: str, difference: float) -> str:
    """How the difference of single runs stands to what seeds alone do to the main pair."""
    metric = METRICS[name]
    deviations = [
        s.std for s in (select.over_seeds(rows, arm, name) for arm in PAIR) if s.n > 1 and not math.isnan(s.std)
    ]
    if not deviations:
        return ""
    yardstick = max(deviations)
    words = "smaller" if abs(difference) <= yardstick else "larger"
    return f", {words} than the spread over seeds of the main pair ({metric.unit * yardstick:,.{metric.digits}f})"


def _seeds(found: Spread) -> str:
    return "1 seed: no verdict" if found.n == 1 else f"{found.n} seeds"


def text_summary(rows: Sequence[Record]) -> str:
    """A line per arm, the rates of a sweep, the claims and what may be compared, as plain text."""
    cells = select.runs(rows)
    if not cells:
        return "no finished cells yet"
    first = cells[0]
    names = [name for name in METRICS if any(select.over_seeds(rows, arm, name).n for arm in select.arms_of(rows))]
    lines = [f"peak rate {select.judged_rate(rows):g}, mean ± deviation over seeds"]
    lines.append(f"{'':<17}{'seeds':>5}" + "".join(f"{METRICS[name].title:>30}" for name in names))
    for arm in select.arms_of(rows):
        mine = select.chosen(rows, arm)
        if mine:
            lines.append(f"{arm:<17}{len(mine):>5}" + "".join(f"{select.show(rows, arm, name):>30}" for name in names))
    if len(select.rates_of(rows)) > 1:
        lines += ["", "test bits per byte by peak rate"]
        lines.append(f"{'':<17}" + "".join(f"{rate:>18g}" for rate in select.rates_of(rows)))
        for arm in select.arms_of(rows):
            values = [select.show(rows, arm, "bits", rate) for rate in select.rates_of(rows)]
            lines.append(f"{arm:<17}" + "".join(f"{text:>18}" for text in values))
    lines += [
        f"{arm}: {n} failed, a step was not finite" for arm in select.arms_of(rows) if (n := select.failed(rows, arm))
    ]
    data = first["data"]
    lines += ["", *claims_text(claims(rows)), "", COMPARABILITY]
    lines.append(f"text: {data['corpus']} ({data['source']}, digest {data['digest']})" + without_files(cells))
    return "\n".join(lines)


def without_files(cells: Sequence[Record]) -> str:
    """What is missing where no data folder was named."""
    if all(row["config"]["downstream"] for row in cells):
        return ""
    return (
        "; WikiText, LAMBADA and the multiple-choice sets were not scored: no data folder (--data, EFLA_DATA) was named"
    )
