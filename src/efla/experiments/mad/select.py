"""Scores from rows: the best of a setting's runs, means over settings and tasks, spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from efla.experiments.mad.config import ARMS, TASK_ORDER
from efla.experiments.mad.config import settings_of as profile_settings
from efla.experiments.mad.tasks import SEED
from efla.runs.records import Record, number
from efla.runs.statistics import Spread, spread

METRICS = {
    "reference_accuracy": "reference accuracy, checkpoint with the lowest test perplexity",
    "reference_accuracy_last": "reference accuracy, last evaluation",
    "token_accuracy": "token accuracy, checkpoint with the lowest test perplexity",
    "token_accuracy_last": "token accuracy, last evaluation",
}


def runs(rows: Sequence[Record]) -> list[Record]:
    """The rows that sum up a protocol run."""
    return [row for row in rows if row.get("row") == "cell" and "arm" in row]


def arms_of(rows: Sequence[Record]) -> list[str]:
    """Arms in the rows, in the order of the config."""
    found = {row["arm"] for row in runs(rows)}
    return [arm for arm in ARMS if arm in found]


def tasks_of(rows: Sequence[Record]) -> list[str]:
    """Tasks in the rows, in the order in which they are run."""
    found = {row["task"] for row in runs(rows)}
    return [task for task in TASK_ORDER if task in found]


def settings_of(rows: Sequence[Record], task: str) -> list[str]:
    """Settings of a task in the rows, in the order of their profile, the baseline first."""
    mine = [row for row in runs(rows) if row["task"] == task]
    found = {row["setting"] for row in mine}
    known = profile_settings(mine[0]["profile"]).values() if mine else ()
    return [setting.name for setting in known if setting.task == task and setting.name in found]


def seeds_of(rows: Sequence[Record], task: str, setting: str, arm: str) -> list[int]:
    """Seeds with which an arm was trained on a setting."""
    return sorted({row["seed"] for row in _chosen(rows, task, setting, arm)})


def setting_score(
    rows: Sequence[Record], task: str, setting: str, arm: str, seed: int, metric: str = "reference_accuracy"
) -> float:
    """The best over learning rates and weight decays; runs whose number is not finite are left out, none left: nan."""
    found = [number(row[metric]) for row in _chosen(rows, task, setting, arm) if row["seed"] == seed]
    return max((value for value in found if math.isfinite(value)), default=math.nan)


def setting_spread(
    rows: Sequence[Record], task: str, setting: str, arm: str, metric: str = "reference_accuracy"
) -> Spread:
    """A setting's score over seeds."""
    return spread(setting_score(rows, task, setting, arm, seed, metric) for seed in seeds_of(rows, task, setting, arm))


def task_score(rows: Sequence[Record], task: str, arm: str, metric: str = "reference_accuracy") -> Spread:
    """Plain mean over the settings of a task that all arms of the rows were run on, first seed; one number, no spread."""
    values = [setting_score(rows, task, name, arm, first_seed(rows), metric) for name in shared_settings(rows, task)]
    return spread([sum(values) / len(values)] if values else [])


def overall_score(rows: Sequence[Record], arm: str, metric: str = "reference_accuracy") -> float:
    """Plain mean of the task scores (not over settings); nan while a task is missing."""
    scores = [task_score(rows, task, arm, metric) for task in TASK_ORDER]
    return math.nan if any(score.n == 0 for score in scores) else sum(s.mean for s in scores) / len(scores)


def first_seed(rows: Sequence[Record]) -> int:
    """The seed reported first: 12345 if it was run."""
    seeds = {row["seed"] for row in runs(rows)}
    return SEED if SEED in seeds else min(seeds, default=SEED)


def shared_settings(rows: Sequence[Record], task: str) -> list[str]:
    """Settings of a task that every arm in the rows of the task was trained on with the first seed."""
    arms = arms_of([row for row in runs(rows) if row["task"] == task])
    first = first_seed(rows)
    return [name for name in settings_of(rows, task) if all(first in seeds_of(rows, task, name, arm) for arm in arms)]


def judged_settings(rows: Sequence[Record], task: str) -> list[str]:
    """The settings on which claims are judged: of the reference profile all that every arm was trained on, as published
    averages are, else the first one, which is the baseline or its short form."""
    if runs(rows)[0]["profile"] == "reference":
        return shared_settings(rows, task)
    return settings_of(rows, task)[:1]


def nonfinite(rows: Sequence[Record], arm: str) -> int:
    """Runs of an arm that were dropped because their metric is not finite."""
    return sum(not math.isfinite(number(row["reference_accuracy"])) for row in runs(rows) if row["arm"] == arm)


def loss_curve(rows: Sequence[Record], task: str, setting: str, arm: str) -> tuple[list[int], list[Spread]]:
    """Training loss against the step in the best run of each seed, spread over the seeds that got that far."""
    found: dict[int, list[float]] = {}
    for seed in seeds_of(rows, task, setting, arm):
        mine = [row for row in _chosen(rows, task, setting, arm) if row["seed"] == seed]
        best = max(mine, key=lambda row: _or_lowest(number(row["reference_accuracy"])))
        for step, loss in best["losses"]:
            found.setdefault(step, []).append(number(loss))
    steps = sorted(found)
    return steps, [spread(found[step]) for step in steps]


def _or_lowest(value: float) -> float:
    return value if math.isfinite(value) else -1.0


def _chosen(rows: Sequence[Record], task: str, setting: str, arm: str) -> list[Record]:
    return [row for row in runs(rows) if (row["task"], row["setting"], row["arm"]) == (task, setting, arm)]
