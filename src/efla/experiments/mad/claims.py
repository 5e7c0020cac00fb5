"""Scores from MAD rows, numbers that others published, the paper's claims, and the summary of the terminal."""

import math
from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from efla.experiments.arms import ARMS
from efla.experiments.mad.config import TASK_ORDER, profile
from efla.experiments.mad.config import settings_of as profile_settings
from efla.experiments.mad.tasks import SEED
from efla.runs.names import name_of
from efla.runs.records import Record, number, to_record
from efla.runs.statistics import (
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


def arms_of(rows: Sequence[Record]) -> list[str]:
    """Arms in the rows, in the order of the config."""
    return Rows(rows).cells().values("arm", order=ARMS)


def tasks_of(rows: Sequence[Record]) -> list[str]:
    """Tasks in the rows, in the order in which they are run."""
    return Rows(rows).cells().values("task", order=TASK_ORDER)


def settings_of(rows: Sequence[Record], task: str) -> list[str]:
    """Settings of a task in the rows, in the order of their profile, the baseline first."""
    mine = Rows(rows).cells().where(task=task)
    known = profile_settings(mine[0]["profile"]).values() if mine else ()
    return mine.values("setting", order=[setting.name for setting in known if setting.task == task])


def runs_of(rows: Sequence[Record], task: str, setting: str, arm: str) -> Rows:
    """The runs of an arm on a setting, one row each."""
    return Rows(rows).cells().where(task=task, setting=setting, arm=arm)


def seeds_of(rows: Sequence[Record], task: str, setting: str, arm: str) -> list[int]:
    """Seeds with which an arm was trained on a setting."""
    return runs_of(rows, task, setting, arm).values("seed")


def setting_score(
    rows: Sequence[Record], task: str, setting: str, arm: str, seed: int, metric: str = "reference_accuracy"
) -> float:
    """The best run over learning rates and weight decays, without non-finite ones; not-a-number if none is left."""
    found = [number(row[metric]) for row in runs_of(rows, task, setting, arm).where(seed=seed)]
    return max((value for value in found if math.isfinite(value)), default=math.nan)


def setting_spread(
    rows: Sequence[Record], task: str, setting: str, arm: str, metric: str = "reference_accuracy"
) -> Spread:
    """A setting's score over seeds."""
    return spread(setting_score(rows, task, setting, arm, seed, metric) for seed in seeds_of(rows, task, setting, arm))


def task_score(rows: Sequence[Record], task: str, arm: str, metric: str = "reference_accuracy") -> Spread:
    """Mean over the settings of a task that all arms of the rows were run on, first seed; one number, no spread."""
    values = [setting_score(rows, task, name, arm, first_seed(rows), metric) for name in shared_settings(rows, task)]
    return spread([sum(values) / len(values)] if values else [])


def overall_score(rows: Sequence[Record], arm: str, metric: str = "reference_accuracy") -> float:
    """Mean of the task scores (not over settings); not-a-number while a task is missing."""
    scores = [task_score(rows, task, arm, metric) for task in TASK_ORDER]
    return math.nan if any(score.n == 0 for score in scores) else sum(s.mean for s in scores) / len(scores)


def first_seed(rows: Sequence[Record]) -> int:
    """The seed reported first: 12345 if it was run."""
    seeds = Rows(rows).cells().values("seed")
    return SEED if SEED in seeds else min(seeds, default=SEED)


def shared_settings(rows: Sequence[Record], task: str) -> list[str]:
    """Settings of a task that every arm in the rows of the task was trained on with the first seed."""
    arms, first = arms_of(Rows(rows).where(task=task)), first_seed(rows)
    return [name for name in settings_of(rows, task) if all(first in seeds_of(rows, task, name, arm) for arm in arms)]


def judged_settings(rows: Sequence[Record], task: str) -> list[str]:
    """The settings on which claims are judged: in the reference profile all that every arm was trained on, as in
    published averages; otherwise the first one, which is the baseline or its short form."""
    if Rows(rows).cells()[0]["profile"] == "reference":
        return shared_settings(rows, task)
    return settings_of(rows, task)[:1]


def nonfinite(rows: Sequence[Record], arm: str) -> int:
    """Number of runs of an arm that are dropped because their metric is not finite."""
    return sum(not math.isfinite(number(row["reference_accuracy"])) for row in Rows(rows).cells().where(arm=arm))


def loss_curve(rows: Sequence[Record], task: str, setting: str, arm: str) -> Curve:
    """Training loss against the step in the best run of each seed, over the seeds that got that far."""

    def score(row: Record) -> float:
        value = number(row["reference_accuracy"])
        return value if math.isfinite(value) else -1.0

    mine = runs_of(rows, task, setting, arm)
    best = [max(mine.where(seed=seed), key=score) for seed in mine.values("seed")]
    return curve((step, number(loss)) for row in best for step, loss in row["losses"])


class Published(NamedTuple):
    """A model's published score on each task, in percent. Only the reference profile may be compared with it."""

    source: str
    model: str
    compression: float
    fuzzy: float
    recall: float
    memorization: float
    noisy: float
    copying: float
    mean: float

    def by_task(self) -> dict[str, float]:
        return {
            "compression": self.compression, "fuzzy-in-context-recall": self.fuzzy, "in-context-recall": self.recall,
            "memorization": self.memorization, "noisy-in-context-recall": self.noisy, "selective-copying": self.copying,
        }  # fmt: skip


_DELTANET = "DeltaNet paper (arXiv 2406.06484)"
_BENCH = "HassanJbara/lin-attn-bench"
_METALA = "MetaLA paper, table A6"
PUBLISHED = (
    Published(_DELTANET, "DeltaNet", 42.2, 35.7, 100, 52.8, 100, 100, 71.8),
    Published(_DELTANET, "Transformer", 51.6, 29.8, 94.1, 85.2, 86.8, 99.6, 74.5),
    Published(_DELTANET, "Mamba", 52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3),
    Published(_DELTANET, "GLA", 38.8, 6.9, 80.8, 63.3, 81.6, 88.6, 60.0),
    Published(_DELTANET, "Hyena", 45.2, 7.9, 81.7, 89.5, 78.8, 93.1, 66.0),
    Published(_DELTANET, "multi-head Hyena", 44.8, 14.4, 99.0, 89.4, 98.6, 93.0, 73.2),
    Published(_BENCH, "DeltaNet", 39.6, 39.3, 99.9, 39.4, 99.9, 99.7, 69.7),
    Published(_BENCH, "Gated DeltaNet", 43.5, 28.6, 99.9, 55.2, 99.9, 99.7, 71.2),
    Published(_BENCH, "Transformer", 43.2, 56.5, 90.5, 78.8, 89.7, 99.8, 76.4),
    Published(_BENCH, "Mamba", 49.1, 12.3, 99.3, 89.6, 99.7, 88.7, 73.1),
    Published(_BENCH, "GLA", 40.8, 15.5, 91.8, 77.1, 93.1, 89.1, 67.9),
    Published(_METALA, "Mamba", 43.95, 9.60, 87.92, 89.45, 90.91, 81.79, 67.27),
    Published(_METALA, "GLA", 37.70, 12.45, 91.58, 57.05, 92.58, 88.63, 63.33),
)

PAPER = {"DeltaNet": 65.7, "EFLA": 66.4}
"""The EFLA paper's averages over the six tasks; it prints no number per task."""


def follows_the_reference(rows: Sequence[Record]) -> bool:
    """Whether every arm was run on all settings with all rates and decays by the reference's protocol."""
    cells = Rows(rows).cells()
    whole = profile("reference")
    group = whole.groups[0]
    wanted = {(name, rate, decay) for name in group.settings for rate in group.rates for decay in group.decays}
    same = ("profile", "width", "heads", "batch", "memorization_batch", "steps", "epochs", "stop_above", "schedule")
    asked = to_record(whole)
    return all(
        wanted <= {(f"{row['task']}/{row['setting']}", row["rate"], row["decay"]) for row in cells if row["arm"] == arm}
        for arm in arms_of(rows)
    ) and all(row["config"][key] == asked[key] for row in cells for key in same)


def comparability(rows: Sequence[Record]) -> str:
    """What the scores may be compared with, for every table."""
    if follows_the_reference(rows):
        return (
            "These runs follow the reference's protocol (all 66 settings, best of six runs each), so their scores may be "
            "put beside published ones; model selection looks at the test set, as the reference's does."
        )
    name = Rows(rows).cells()[0]["profile"]
    reason = (
        "the profile was not run whole and as it is"
        if name == "reference"
        else "it runs fewer settings with a smaller budget"
    )
    return f"Scores of the {name} profile may be compared across arms of the same profile, never with published ones: {reason}."


PAIRS = (("exact-flow", "delta-l2"), ("exact-flow", "delta-raw"), ("gated-exact-flow", "gated-delta"))
MOST = ("memorization", "compression")
_EACH = "EFLA is better than DeltaNet on all six tasks"
_MEAN = f"EFLA's average over the six tasks is {PAPER['EFLA'] - PAPER['DeltaNet']:.1f} points higher"
_MOST = "The gain is largest on Memorize and Compress"


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on all tasks and on each, (b) on the average and (c) on the largest gains, over the seeds of both arms.

    The reference profile is judged on every setting of a task, as in published averages, the others on the baseline.
    """
    found = []
    arms = arms_of(rows)
    for ours, theirs in (pair for pair in PAIRS if set(pair) <= set(arms)):
        scores = {task: [_scores(rows, task, arm) for arm in (ours, theirs)] for task in TASK_ORDER}
        is_main = (ours, theirs) == PAIRS[0]
        against = "" if is_main else f", {name_of(ours)} against {name_of(theirs)}"
        each = [
            compare("a", _EACH, f"{_on(rows, task)}{against}", *scores[task], unit="points", scale=100)
            for task in TASK_ORDER
            if scores[task][0].keys() & scores[task][1].keys()
        ]
        if not each:
            continue
        # Pairs with one seed are one line: their tasks have no verdicts.
        found += [_all_claim(each, against), *(claim for claim in each if claim.verdict != NOT_JUDGED)]
        if len(each) == len(TASK_ORDER):
            means = [_mean({task: both[i] for task, both in scores.items()}) for i in (0, 1)]
            note = "" if follows_the_reference(rows) else "the paper's value is of other settings and another budget"
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
    reason = "gains " + ", ".join(
        f"{task} {'diverged' if math.isnan(means[task]) else f'{means[task]:+.1f}'}" for task in order
    )
    return Claim("c", _MOST, f"these two minus the rest{against}", found.verdict, reason, found, "points")


def _mean(values: dict[str, dict[int, float]]) -> dict[int, float]:
    """Seed -> mean over tasks, for the seeds of all tasks."""
    seeds = set.intersection(*(set(found) for found in values.values()))
    return {seed: sum(found[seed] for found in values.values()) / len(values) for seed in sorted(seeds)}


def _on(rows: Sequence[Record], task: str) -> str:
    names = judged_settings(rows, task)
    return f"{task} ({names[0] if len(names) == 1 else f'mean of {len(names)} settings'})"


def _scores(rows: Sequence[Record], task: str, arm: str) -> dict[int, float]:
    """Seed -> mean over the settings that are judged, for the seeds that were trained on all of them."""
    names = judged_settings(rows, task)
    seeds = set.intersection(*(set(seeds_of(rows, task, name, arm)) for name in names)) if names else set()
    return {seed: sum(setting_score(rows, task, n, arm, seed) for n in names) / len(names) for seed in sorted(seeds)}


def text_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """Scores in percent per setting and arm, the claims, and what may be compared, as plain text."""
    if not Rows(rows).cells():
        return "no finished cells yet"
    arms = arms_of(rows)
    lines = [
        [f"{task}, {name}", *(setting_spread(rows, task, name, arm).text(100) for arm in arms)]
        for task in tasks_of(rows)
        for name in settings_of(rows, task)
    ]
    overall = [overall_score(rows, arm) for arm in arms]
    if any(math.isfinite(value) for value in overall):
        shown = ["–" if math.isnan(value) else f"{100 * value:.1f}" for value in overall]  # noqa: RUF001
        lines.append(["mean of task scores, first seed", *shown])
    text = ["Accuracy in %, best of the rates, mean ± deviation over seeds"]
    text += text_table(["", *map(name_of, arms)], lines)
    dropped = {arm: nonfinite(rows, arm) for arm in arms}
    text += [f"{name_of(arm)}: {count} of its runs not finite" for arm, count in dropped.items() if count]
    return "\n".join([*text, "", *claims_text(claims(rows), verbose), fill(comparability(rows), 80)])
