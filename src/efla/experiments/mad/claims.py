"""Scores from MAD rows, numbers that others published, the paper's claims, and the summary of the terminal."""

import csv
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from textwrap import fill

from efla.experiments.arms import ARMS
from efla.experiments.mad.config import TASK_ORDER, profile, settings_of
from efla.experiments.mad.tasks import SEED
from efla.runs.names import name_of
from efla.runs.records import Record, number, to_record
from efla.runs.statistics import (
    MISSING,
    NOT_JUDGED,
    Claim,
    Curve,
    Rows,
    Spread,
    advantages,
    compare,
    compare_all,
    curve,
    difference,
    spread,
)
from efla.runs.text import claims_text, text_table

METRICS = {
    "reference_accuracy": "reference accuracy, checkpoint with the lowest test perplexity",
    "reference_accuracy_last": "reference accuracy, last evaluation",
    "token_accuracy": "token accuracy, checkpoint with the lowest test perplexity",
    "token_accuracy_last": "token accuracy, last evaluation",
}


class Runs(Rows):
    """The rows that summarise a run."""

    def __init__(self, rows: Iterable[Record]) -> None:
        super().__init__(row for row in rows if row.get("row") == "cell")
        self.arms: list[str] = self.values("arm", order=ARMS)
        self.tasks: list[str] = self.values("task", order=TASK_ORDER)
        seeds = self.values("seed")
        # The seed reported first.
        self.first_seed: int = SEED if SEED in seeds else min(seeds, default=SEED)

    def settings(self, task: str) -> list[str]:
        """Settings of a task, in the order of their profile, the baseline first."""
        mine = self.where(task=task)
        known = settings_of(mine[0]["profile"]).values() if mine else ()
        return mine.values("setting", order=[setting.name for setting in known if setting.task == task])

    def at(self, task: str, setting: str, arm: str) -> Rows:
        """The runs of an arm on a setting, one row each."""
        return self.where(task=task, setting=setting, arm=arm)

    def scores(self, task: str, setting: str, arm: str, metric: str = "reference_accuracy") -> dict[int, float]:
        """Seed -> best run over learning rates and weight decays, without non-finite ones; not-a-number if none is left."""
        found: dict[int, list[float]] = {}
        for row in self.at(task, setting, arm):
            found.setdefault(row["seed"], []).append(number(row[metric]))
        return {seed: max(filter(math.isfinite, found[seed]), default=math.nan) for seed in sorted(found)}

    def task_score(self, task: str, arm: str) -> Spread:
        """Mean over the :meth:`shared_settings` of a task, first seed; one number, no spread, none if the arm lacks one of
        them."""
        found = [self.scores(task, name, arm).get(self.first_seed) for name in self.shared_settings(task)]
        values = [value for value in found if value is not None]
        return spread([sum(values) / len(values)] if values and len(values) == len(found) else [])

    def overall_score(self, arm: str) -> float:
        """Mean of the task scores (not over settings); not-a-number while a task is missing."""
        scores = [self.task_score(task, arm) for task in TASK_ORDER]
        return math.nan if any(score.n == 0 for score in scores) else sum(s.mean for s in scores) / len(scores)

    def shared_settings(self, task: str) -> list[str]:
        """Settings of a task that every arm in its rows was trained on with the first seed, without arms that have fewer
        tasks."""
        tasks = {arm: len(self.where(arm=arm).values("task")) for arm in self.arms}
        arms = [arm for arm in self.where(task=task).values("arm") if tasks[arm] == max(tasks.values())]
        first = self.where(seed=self.first_seed)
        return [
            name for name in self.settings(task) if all(first.where(task=task, setting=name, arm=arm) for arm in arms)
        ]

    def judged_settings(self, task: str) -> list[str]:
        """The settings on which claims are judged: in the reference profile all that every arm was trained on, as in
        published averages; otherwise the first one, which is the baseline or its short form."""
        return self.shared_settings(task) if self[0]["profile"] == "reference" else self.settings(task)[:1]

    def judged_scores(self, task: str, arm: str) -> dict[int, float]:
        """Seed -> mean over the settings that are judged, for the seeds that were trained on all of them."""
        return _mean({name: self.scores(task, name, arm) for name in self.judged_settings(task)})

    def nonfinite(self, arm: str) -> int:
        """Number of runs of an arm that are dropped because their metric is not finite."""
        return sum(not math.isfinite(number(row["reference_accuracy"])) for row in self.where(arm=arm))

    def loss_curve(self, task: str, setting: str, arm: str) -> Curve:
        """Training loss against the step in the best run of each seed, over the seeds that got that far."""

        def score(row: Record) -> float:
            value = number(row["reference_accuracy"])
            return value if math.isfinite(value) else -1.0

        mine = self.at(task, setting, arm)
        best = [max(mine.where(seed=seed), key=score) for seed in mine.values("seed")]
        return curve((step, number(loss)) for row in best for step, loss in row["losses"])

    def follow_the_reference(self) -> bool:
        """Whether every arm was run on all settings with all rates and decays by the reference's protocol."""
        whole = profile("reference")
        group = whole.groups[0]
        wanted = {(name, rate, decay) for name in group.settings for rate in group.rates for decay in group.decays}
        same = ("profile", "width", "heads", "batch", "memorization_batch", "steps", "epochs", "stop_above", "schedule")
        asked = to_record(whole)
        return all(
            wanted <= {(f"{row['task']}/{row['setting']}", row["rate"], row["decay"]) for row in self.where(arm=arm)}
            for arm in self.arms
        ) and all(row["config"][key] == asked[key] for row in self for key in same)

    def comparability(self) -> str:
        """What the scores may be compared with, for every table."""
        if self.follow_the_reference():
            return (
                "These runs follow the reference's protocol (all 66 settings, best of six runs each), so their scores may be "
                "put beside published ones; model selection looks at the test set, as the reference's does."
            )
        name, reason = self[0]["profile"], "it runs fewer settings with a smaller budget"
        if name == "reference":
            reason = "the profile was not run whole and as it is"
        scores = f"Scores of the {name} profile may be compared across arms of the same profile"
        return f"{scores}, never with published ones: {reason}."


@cache
def published() -> list[dict[str, str]]:
    """Scores that others published, in percent by task. Only the reference profile may be compared with them."""
    with open(Path(__file__).with_name("published.csv"), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


PAPER = {"DeltaNet": 65.7, "EFLA": 66.4}
"""The EFLA paper's averages over the six tasks; it prints no number per task."""


PAIRS = (("exact-flow", "delta-l2"), ("exact-flow", "delta-raw"), ("gated-exact-flow", "gated-delta"))
MOST = ("memorization", "compression")
_EACH = "EFLA is better than DeltaNet on all six tasks"
_MEAN = f"EFLA's average over the six tasks is {PAPER['EFLA'] - PAPER['DeltaNet']:.1f} points higher"
_MOST = "The gain is largest on Memorize and Compress"


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on all tasks and on each, (b) on the average and (c) on the largest gains, over the seeds of both arms.

    The reference profile is judged on every setting of a task, as in published averages, the others on the baseline.
    """
    runs, found = Runs(rows), []
    for ours, theirs in (pair for pair in PAIRS if set(pair) <= set(runs.arms)):
        scores = {task: [runs.judged_scores(task, arm) for arm in (ours, theirs)] for task in TASK_ORDER}
        is_main = (ours, theirs) == PAIRS[0]
        against = "" if is_main else f", {name_of(ours)} against {name_of(theirs)}"
        each = [
            compare("a", _EACH, f"{_on(runs, task)}{against}", *scores[task], unit="points", scale=100)
            for task in TASK_ORDER
            if scores[task][0].keys() & scores[task][1].keys()
        ]
        if not each:
            continue
        # Pairs with one seed are one line: their tasks have no verdicts.
        found += [_all_claim(each, against), *(claim for claim in each if claim.verdict != NOT_JUDGED)]
        if len(each) == len(TASK_ORDER):
            means = [_mean({task: both[i] for task, both in scores.items()}) for i in (0, 1)]
            note = "" if runs.follow_the_reference() else "the paper's value is of other settings and another budget"
            paper = PAPER["EFLA"] - PAPER["DeltaNet"] if is_main else None
            found.append(
                compare(
                    "b", _MEAN, f"mean of six tasks{against}", *means, unit="points", scale=100, digits=2,
                    paper=paper, note=note if is_main else "",
                )
            )  # fmt: skip
            found.append(_most_claim({task: advantages(*both) for task, both in scores.items()}, against))
    return sorted(found, key=lambda claim: claim.letter)


def _all_claim(each: Sequence[Claim], against: str) -> Claim:
    """Seen (or reversed) if every task says so; no verdict while a task is missing."""
    tasks = {claim.pair.split(",")[0]: claim.difference for claim in each if claim.difference}
    found = compare_all("a", _EACH, f"all six tasks{against}", tasks, unit="points", kind="task")
    if not (missing := len(TASK_ORDER) - len(each)):
        return found
    return found._replace(verdict=NOT_JUDGED, reason=f"{found.reason}; not run: {missing} of {len(TASK_ORDER)} tasks")


def _most_claim(gains: dict[str, dict[int, float]], against: str) -> Claim:
    """The difference is the mean gain on the two tasks minus that on the other four, seed by seed."""
    two, four = (_mean({t: g for t, g in gains.items() if (t in MOST) == most}) for most in (True, False))
    found = difference(100 * value for value in advantages(two, four).values())
    means = {task: difference(100 * value for value in gain.values()).mean for task, gain in gains.items()}
    order = sorted(means, key=lambda task: (math.isnan(means[task]), -means[task]))
    shown = ("diverged" if math.isnan(means[task]) else f"{means[task]:+.1f}" for task in order)
    reason = "gains " + ", ".join(map(" ".join, zip(order, shown, strict=True)))
    return Claim("c", _MOST, f"these two minus the rest{against}", found.verdict, reason, found, "points")


def _mean(values: dict[str, dict[int, float]]) -> dict[int, float]:
    """Seed -> mean over tasks or settings, for the seeds that all of them have."""
    seeds = set.intersection(*(set(found) for found in values.values())) if values else set()
    return {seed: sum(found[seed] for found in values.values()) / len(values) for seed in sorted(seeds)}


def _on(runs: Runs, task: str) -> str:
    names = runs.judged_settings(task)
    return f"{task} ({names[0] if len(names) == 1 else f'mean of {len(names)} settings'})"


def percent(value: float) -> str:
    """A share in percent."""
    return MISSING if math.isnan(value) else f"{100 * value:.1f}"


def text_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """Scores in percent per setting (verbose; else the first of each task) and arm, the claims, and what may be compared."""
    runs = Runs(rows)
    if not runs:
        return "no finished cells yet"
    lines = [
        [f"{task}, {name}", *(spread(runs.scores(task, name, arm).values()).text(100) for arm in runs.arms)]
        for task in runs.tasks
        for name in runs.settings(task)[: None if verbose else 1]
    ]
    overall = [runs.overall_score(arm) for arm in runs.arms]
    if any(math.isfinite(value) for value in overall):
        lines.append(["mean of task scores, first seed", *map(percent, overall)])
    text = ["Accuracy in %, best of the rates, mean ± deviation over seeds"]
    text += text_table(["", *map(name_of, runs.arms)], lines)
    dropped = {arm: runs.nonfinite(arm) for arm in runs.arms}
    text += [f"{name_of(arm)}: {count} of its runs not finite" for arm, count in dropped.items() if count]
    return "\n".join([*text, "", *claims_text(claims(rows), verbose), fill(runs.comparability(), 80)])
