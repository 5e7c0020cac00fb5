"""The results of the language models, from rows: metrics over seeds, curves, the paper's claims, terminal summary.

Failed runs count as not-a-number, not as missing.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from efla.experiments.lm.config import ARM_ORDER, CHOICES, PAIR, PEAK_RATE
from efla.runs.records import Record, number
from efla.runs.statistics import NOT_JUDGED, Claim, Curve, Rows, Spread, claims_text, curve, effect, judge, spread

COMPARABILITY = (
    "These models have 200 to 800 times fewer parameters than the paper's 340M, saw a thousandth of the tokens or less, and "
    "other text: compare only the direction of a difference, not its size."
)


class Metric(NamedTuple):
    """A number of a row: its group and key in the row, its title, and how it is shown."""

    group: str
    key: str
    title: str
    unit: float = 1.0
    digits: int = 2
    lower_is_better: bool = True

    def text(self, found: Spread) -> str:
        """The metric as shown; large numbers have commas."""
        if self.digits or not found.n or math.isnan(found.mean):
            return found.text(self.unit, self.digits)
        return f"{found.mean:,.0f}" + ("" if found.n < 2 else f" ± {found.std:,.0f}")


METRICS = {
    "bits": Metric("test", "bits", "test bits per byte", digits=4),
    "perplexity": Metric("test", "perplexity", "test byte perplexity", digits=3),
    "validation": Metric("validation", "bits", "validation bits per byte", digits=4),
    "wikitext": Metric("wikitext", "word_perplexity", "WikiText word perplexity", digits=0),
    "lambada_perplexity": Metric("lambada", "perplexity", "LAMBADA perplexity per word", digits=0),
    "lambada_accuracy": Metric("lambada", "accuracy", "LAMBADA accuracy, %", 100.0, 2, False),
}


class Runs(Rows):
    """The rows that summarise a run."""

    def __init__(self, rows: Iterable[Record]) -> None:
        super().__init__(row for row in rows if row.get("row") == "cell" and "arm" in row)
        self.arms: list[str] = self.values("arm", ARM_ORDER)
        self.rates: list[float] = self.values("rate")
        counts = Counter(float(row["rate"]) for row in self)
        # The rate of the tables: the protocol's if it was run, else that of most runs.
        self.rate = PEAK_RATE if PEAK_RATE in counts or not counts else counts.most_common(1)[0][0]

    def at(self, arm: str, rate: float | None = None) -> Rows:
        """The runs of an arm at a rate, by seed."""
        return Rows(sorted(self.where(arm=arm, rate=self.rate if rate is None else rate), key=lambda row: row["seed"]))

    def metric(self, arm: str, name: str, rate: float | None = None, *, shared_with: str | None = None) -> Spread:
        """A metric of an arm over its seeds, or over the seeds that another arm has too."""
        group, key = METRICS[name][:2]
        mine = [row for row in self.at(arm, rate) if group in row]
        if shared_with is not None:
            theirs = self.at(shared_with, rate).values("seed")
            mine = [row for row in mine if row["seed"] in theirs]
        return spread(math.nan if row["failed"] else number(row[group][key]) for row in mine)

    def text(self, arm: str, name: str, rate: float | None = None) -> str:
        return METRICS[name].text(self.metric(arm, name, rate))

    def measured(self) -> list[str]:
        """Names of the metrics that some arm has."""
        return [name for name in METRICS if any(self.metric(arm, name).n for arm in self.arms)]

    def choice(self, arm: str, task: str) -> tuple[float, int] | None:
        """Accuracy by the paper's metric, and number of items, of a multiple-choice set. One seed is scored."""
        for row in self.at(arm):
            if "choices" in row:
                found = row["choices"][task]
                return number(found[CHOICES[task].metric]), found["items"]
        return None

    def over_bytes(self, arm: str, key: str) -> Curve:
        """A curve of the rows against million bytes seen, over the seeds that got that far."""
        mine = [(row["bytes_seen"] // row["steps"], row[key]) for row in self.at(arm)]
        x, y = curve((int(step) * per_step, number(bits)) for per_step, points in mine for step, bits in points)
        return [seen / 1e6 for seen in x], y

    def over_positions(self, arm: str) -> Curve:
        """Bits per byte by position (the last of each bucket), over seeds."""
        mine = [row["positions"] for row in self.at(arm) if "positions" in row and not row["failed"]]
        return curve((end, number(b)) for found in mine for end, b in zip(found["ends"], found["bits"], strict=True))

    def failures(self) -> dict[str, int]:
        """The arms with failed runs, and how many."""
        return {arm: n for arm in self.arms if (n := len(self.where(arm=arm, failed=True)))}

    def missing_files(self) -> str:
        """A note for runs without a data folder."""
        if all(row["config"]["downstream"] for row in self):
            return ""
        return "; WikiText, LAMBADA and the multiple-choice sets are not scored: no data folder (--data, EFLA_DATA) was given"

    def chance_sentence(self) -> str:
        """How many multiple-choice accuracies are consistent with chance."""
        near, total = 0, 0
        for arm in self.arms:
            for task, column in CHOICES.items():
                found = self.choice(arm, task)
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


_SENTENCES = {
    "a": "EFLA has a lower perplexity than DeltaNet at the same size and budget",
    "b": "Gated EFLA has a lower perplexity than Gated DeltaNet",
    "c": "EFLA is competitive with Mamba-2",
    "d": "EFLA's zero-shot accuracy is higher on average",
}
_MAIN = "exact-flow against delta-l2 (DeltaNet as in flash-linear-attention; rule and key norm differ)"
_PERPLEXITIES = ("bits", "wikitext", "lambada_perplexity")
# Claim, our arm, their arm, what is compared, metrics.
_COMPARISONS = (
    ("a", "exact-flow", "delta-l2", _MAIN, _PERPLEXITIES),
    ("a", "exact-flow", "delta-raw", "the rule alone, raw keys", ("bits",)),
    ("a", "exact-flow-l2", "delta-l2", "the rule alone, L2 keys", ("bits",)),
    ("b", "gated-exact-flow", "gated-delta", "gated-exact-flow against gated-delta (rule and key norm differ)", _PERPLEXITIES),
    ("c", "exact-flow", "mamba2", "exact-flow against mamba2", ("bits",)),
    ("d", "exact-flow", "delta-l2", _MAIN, ("lambada_accuracy",)),
)  # fmt: skip


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) to (d), as far as their arms were run."""
    runs, found = Runs(rows), []
    for letter, ours, theirs, pair, names in _COMPARISONS:
        for name in names:
            if runs.metric(ours, name).n and runs.metric(theirs, name).n:
                found.append(_compare(runs, letter, ours, theirs, pair, name))
    if found and found[-1].letter == "d":
        # One set says nothing about the average, and at this size LAMBADA's last words are rarely predicted.
        found[-1] = found[-1]._replace(verdict=NOT_JUDGED, reason=f"{found[-1].reason}; one of nine sets", effect=None)
        if at_chance := runs.chance_sentence():
            found.append(Claim("d", _SENTENCES["d"], "the eight multiple-choice sets", NOT_JUDGED, at_chance))
    return found


def _compare(runs: Runs, letter: str, ours: str, theirs: str, pair: str, name: str) -> Claim:
    metric, lower = METRICS[name], METRICS[name].lower_is_better
    a, b = runs.metric(ours, name, shared_with=theirs), runs.metric(theirs, name, shared_with=ours)
    text = f"{metric.text(a)} against {metric.text(b)}"
    difference = metric.unit * (a.mean - b.mean)
    if not math.isnan(difference):
        text += f": {difference:+,.{metric.digits}f}"
        if lower and b.mean > 0:
            text += f" ({100 * (a.mean / b.mean - 1):+.1f} %)"
        elif metric.unit == 100:
            text += " points"
    text += "; 1 seed: no verdict" if a.n == 1 else f"; {a.n} seeds"
    verdict = judge(a, b, lower_is_better=lower)
    if verdict == NOT_JUDGED and not math.isnan(difference):
        # Set the difference of single runs against the spread over seeds of the main pair.
        spreads = [s.std for arm in PAIR if (s := runs.metric(arm, name)).n > 1 and not math.isnan(s.std)]
        if spreads:
            words = "smaller" if abs(difference / metric.unit) <= max(spreads) else "larger"
            yardstick = f"{metric.unit * max(spreads):,.{metric.digits}f}"
            text += f", {words} than the spread over seeds of the main pair ({yardstick})"
    better = effect(a, b, lower_is_better=lower)
    return Claim(letter, _SENTENCES[letter], f"{metric.title}: {pair}", verdict, text, effect=better)


def text_summary(rows: Sequence[Record]) -> str:
    """One line per arm, the rates of a sweep, the claims and what can be compared, as plain text."""
    runs = Runs(rows)
    if not runs:
        return "no finished cells yet"
    names = runs.measured()
    lines = [f"peak rate {runs.rate:g}, mean ± deviation over seeds"]
    lines.append(f"{'':<17}{'seeds':>5}" + "".join(f"{METRICS[name].title:>30}" for name in names))
    for arm in runs.arms:
        if count := len(runs.at(arm)):
            lines.append(f"{arm:<17}{count:>5}" + "".join(f"{runs.text(arm, name):>30}" for name in names))
    if len(runs.rates) > 1:
        lines += ["", "test bits per byte by peak rate"]
        lines.append(f"{'':<17}" + "".join(f"{rate:>18g}" for rate in runs.rates))
        for arm in runs.arms:
            lines.append(f"{arm:<17}" + "".join(f"{runs.text(arm, 'bits', rate):>18}" for rate in runs.rates))
    lines += [f"{arm}: {n} failed, a step was not finite" for arm, n in runs.failures().items()]
    lines += ["", *claims_text(claims(rows)), "", COMPARABILITY]
    data = runs[0]["data"]
    lines.append(f"text: {data['corpus']} ({data['source']}, digest {data['digest']}){runs.missing_files()}")
    return "\n".join(lines)
