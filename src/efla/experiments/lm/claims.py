"""The results of the language models, from rows: metrics over seeds, curves, the paper's claims, terminal summary.

Failed runs count as not-a-number, not as missing.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import NamedTuple

from efla.evaluation.table import paper_rows
from efla.experiments.lm.config import ARM_ORDER, CHOICES, PAIR, PEAK_RATE
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.statistics import NOT_TESTABLE, Claim, Curve, Rows, Spread, compare, curve, spread
from efla.runs.text import claims_text, text_table

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
    short: str = ""

    def text(self, found: Spread) -> str:
        """The metric as shown; large numbers have commas."""
        if self.digits or not found.n or math.isnan(found.mean):
            return found.text(self.unit, self.digits)
        return f"{found.mean:,.0f}" + ("" if found.n < 2 else f" ± {found.std:,.0f}")


METRICS = {
    "bits": Metric("test", "bits", "test bits per byte", digits=4, short="test bits"),
    "perplexity": Metric("test", "perplexity", "test byte perplexity", digits=3, short="test perplexity"),
    "validation": Metric("validation", "bits", "validation bits per byte", digits=4, short="validation bits"),
    "wikitext": Metric("wikitext", "word_perplexity", "WikiText word perplexity", digits=0, short="WikiText"),
    "lambada_perplexity": Metric("lambada", "perplexity", "LAMBADA perplexity per word", digits=0, short="LAMBADA"),
    "lambada_accuracy": Metric("lambada", "accuracy", "LAMBADA accuracy, %", 100.0, 2, "LAMBADA accuracy"),
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

    def by_seed(self, arm: str, name: str, rate: float | None = None) -> dict[int, float]:
        """Seed -> a metric of an arm; not-a-number where the run failed."""
        group, key = METRICS[name][:2]
        mine = [row for row in self.at(arm, rate) if group in row]
        return {row["seed"]: math.nan if row["failed"] else number(row[group][key]) for row in mine}

    def metric(self, arm: str, name: str, rate: float | None = None, *, shared_with: str | None = None) -> Spread:
        """A metric of an arm over its seeds, or over the seeds that another arm has too."""
        mine = self.by_seed(arm, name, rate)
        seeds = mine if shared_with is None else mine.keys() & set(self.at(shared_with, rate).values("seed"))
        return spread(mine[seed] for seed in seeds)

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
        near = [
            abs(found[0] - chance) <= 2 * math.sqrt(chance * (1 - chance) / found[1])
            for arm in self.arms
            for task, column in CHOICES.items()
            if (found := self.choice(arm, task)) and (chance := (column.chance or 0) / 100)
        ]
        if not near:
            return ""
        return (
            f"{sum(near)} of {len(near)} accuracies (all arms, one seed) lie within two standard errors of chance: a test of the "
            "scorer, not averaged into a claim"
        )


_SENTENCES = {
    "a": "EFLA has a lower perplexity than DeltaNet at the same size and budget",
    "b": "Gated EFLA has a lower perplexity than Gated DeltaNet",
    "c": "EFLA is competitive with Mamba-2",
    "d": "EFLA's zero-shot accuracy is higher on average",
}
_PERPLEXITIES = ("bits", "wikitext", "lambada_perplexity")
_PAPER_COLUMNS = {"wikitext": "wikitext", "lambada_perplexity": "lambada_ppl"}
# Claim, our arm, their arm, metrics. The rule alone differs where both arms have raw or both have normalised keys.
_COMPARISONS = (
    ("a", "exact-flow", "delta-l2", _PERPLEXITIES),
    ("a", "exact-flow", "delta-raw", ("bits",)),
    ("a", "exact-flow-l2", "delta-l2", ("bits",)),
    ("b", "gated-exact-flow", "gated-delta", _PERPLEXITIES),
    ("c", "exact-flow", "mamba2", ("bits", "wikitext")),
)


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) to (d), as far as their arms were run. Perplexities are compared in percent of theirs, seed by seed."""
    runs, found = Runs(rows), []
    for letter, ours, theirs, names in _COMPARISONS:
        for name in names:
            values = [runs.by_seed(arm, name) for arm in (ours, theirs)]
            if not all(values):
                continue
            metric = METRICS[name]
            against = "" if (ours, theirs) == PAIR[::-1] else f", {name_of(ours)} against {name_of(theirs)}"
            relative = name in _PAPER_COLUMNS
            unit, paper = ("%", _papers(ours, theirs, name)) if relative else ("bits", None)
            found.append(
                compare(
                    letter, _SENTENCES[letter], f"{metric.short}{against}", *values, unit=unit, digits=metric.digits,
                    lower_is_better=True, relative=relative, paper=paper,
                )
            )  # fmt: skip
    if all(runs.by_seed(arm, "lambada_accuracy") for arm in PAIR):
        reason = "needs the paper's 340M models; at this size accuracies are at chance"
        found.append(Claim("d", _SENTENCES["d"], "nine sets", NOT_TESTABLE, reason))
    return found


def _papers(ours: str, theirs: str, name: str) -> float | None:
    """By how many percent the perplexity of ours was lower in the paper's 340M models."""
    table = paper_rows("340M")
    a, b = (table.get(name_of(arm), {}).get(_PAPER_COLUMNS[name]) for arm in (ours, theirs))
    return None if a is None or b is None else 100 * (1 - a / b)


def text_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """One line per arm, the claims and what can be compared, as plain text; verbose: also the rates of a sweep."""
    runs = Runs(rows)
    if not runs:
        return "no finished cells yet"
    names = runs.measured() if verbose else [name for name in runs.measured() if name in _PERPLEXITIES]
    arms = [arm for arm in runs.arms if runs.at(arm)]
    table = [[name_of(arm), str(len(runs.at(arm))), *(runs.text(arm, name) for name in names)] for arm in arms]
    lines = [f"Perplexity and bits at peak rate {runs.rate:g}, mean ± deviation over seeds"]
    lines += text_table(["", "seeds", *(METRICS[name].short for name in names)], table)
    if verbose and len(runs.rates) > 1:
        sweep = [[name_of(arm), *(runs.text(arm, "bits", rate) for rate in runs.rates)] for arm in runs.arms]
        lines += ["", *text_table(["test bits per byte", *(f"{rate:g}" for rate in runs.rates)], sweep)]
    lines += [f"{name_of(arm)}: {n} failed, a step was not finite" for arm, n in runs.failures().items()]
    data = runs[0]["data"]
    lines += ["", *claims_text(claims(rows), verbose), fill(COMPARABILITY, 80)]
    lines.append(f"text: {data['corpus']} ({data['source']}, digest {data['digest']}){runs.missing_files()}")
    return "\n".join(lines)
