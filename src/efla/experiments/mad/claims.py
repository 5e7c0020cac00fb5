"""The paper's claims about MAD judged from rows, and the terminal's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from efla.experiments.mad import select
from efla.experiments.mad.config import TASK_ORDER
from efla.experiments.mad.published import PAPER, comparability, follows_the_reference
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
    spread,
)

PAIRS = {
    "delta-l2": "exact-flow against delta-l2 (DeltaNet as in flash-linear-attention; rule and key norm differ)",
    "delta-raw": "exact-flow against delta-raw (the rule alone differs)",
}
MOST = ("memorization", "compression")
_EACH = "EFLA is better than DeltaNet on all six tasks"
_MEAN = f"EFLA's average over the six tasks is {PAPER['EFLA'] - PAPER['DeltaNet']:.1f} points higher"
_MOST = "The gain is largest on Memorize and Compress"


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on all tasks and on each, (b) on the average and (c) on the largest gains, over the seeds of both arms.

    The reference profile is judged on every setting of a task, as published averages are, the others on the baseline.
    """
    found = []
    arms = select.arms_of(rows)
    others = [other for other in PAIRS if other in arms and "exact-flow" in arms]
    for other in others:
        each = {task: _task_claim(rows, task, other) for task in TASK_ORDER if _common_seeds(rows, [task], other)}
        found += [_all_claim(each, other), *each.values()]
    for other in others:
        if _common_seeds(rows, TASK_ORDER, other):
            found += [_mean_claim(rows, other), _most_claim(rows, other)]
    return found


def _all_claim(each: dict[str, Claim], other: str) -> Claim:
    """Seen if it is on every task, reversed if it is on every task; no verdict while one is missing."""
    verdicts = {task: claim.verdict for task, claim in each.items()}
    kinds = set(verdicts.values())
    if len(verdicts) < len(TASK_ORDER) or NOT_JUDGED in kinds:
        verdict = NOT_JUDGED
    else:
        verdict = kinds.pop() if kinds in ({SEEN}, {REVERSED}) else NOT_SEEN
    parts = []
    for kind in (SEEN, NOT_SEEN, REVERSED, NOT_JUDGED):
        tasks = [task for task, mine in verdicts.items() if mine == kind]
        if tasks:
            parts.append(f"{kind} at {len(tasks)} ({', '.join(tasks)})")
    missing = len(TASK_ORDER) - len(verdicts)
    if missing:
        parts.append(f"not run at {missing}")
    return Claim("a", _EACH, f"all six together: {PAIRS[other]}", verdict, "; ".join(parts))


def _task_claim(rows: Sequence[Record], task: str, other: str) -> Claim:
    seeds = _common_seeds(rows, [task], other)
    ours, theirs = (spread(_score(rows, task, arm, seed) for seed in seeds) for arm in ("exact-flow", other))
    numbers = f"{ours.percent()} against {theirs.percent()}{_by(ours, theirs)}, {_seeds(ours)}"
    names = select.judged_settings(rows, task)
    where = names[0] if len(names) == 1 else f"mean of {len(names)} settings"
    return Claim("a", _EACH, f"{task}, {where}: {PAIRS[other]}", judge(ours, theirs), numbers, effect(ours, theirs))


def _mean_claim(rows: Sequence[Record], other: str) -> Claim:
    """Of the sign alone: whether the difference is the paper's 0.7 is for the numbers to say."""
    seeds = _common_seeds(rows, TASK_ORDER, other)
    ours, theirs = (
        spread(sum(_score(rows, task, arm, seed) for task in TASK_ORDER) / len(TASK_ORDER) for seed in seeds)
        for arm in ("exact-flow", other)
    )
    numbers = f"{ours.percent(2)} against {theirs.percent(2)}{_by(ours, theirs, 2)}, {_seeds(ours)}; "
    numbers += f"the paper's {PAPER['EFLA']} against {PAPER['DeltaNet']}"
    numbers += " are over all settings" if follows_the_reference(rows) else " are of other settings and another budget"
    return Claim("b", _MEAN, f"sign only: {PAIRS[other]}", judge(ours, theirs), numbers, effect(ours, theirs))


def _most_claim(rows: Sequence[Record], other: str) -> Claim:
    """Seen if the smaller gain on the two tasks exceeds the largest gain elsewhere by more than its spread over seeds."""
    gains = [
        {task: _score(rows, task, "exact-flow", seed) - _score(rows, task, other, seed) for task in TASK_ORDER}
        for seed in _common_seeds(rows, TASK_ORDER, other)
    ]
    lead = spread(
        min(gain[task] for task in MOST) - max(gain[task] for task in TASK_ORDER if task not in MOST) for gain in gains
    )
    lag = spread(
        min(gain[task] for task in TASK_ORDER if task not in MOST) - max(gain[task] for task in MOST) for gain in gains
    )
    if lead.n < 2 or math.isnan(lead.mean):
        verdict = NOT_JUDGED
    else:
        verdict = SEEN if lead.mean > lead.std else REVERSED if lag.mean > lag.std else NOT_SEEN
    means = {task: spread(gain[task] for gain in gains) for task in TASK_ORDER}
    order = sorted(TASK_ORDER, key=lambda task: (math.isnan(means[task].mean), -means[task].mean))
    numbers = "gain in points: " + ", ".join(f"{task} {means[task].text(100)}" for task in order)
    return Claim("c", _MOST, PAIRS[other], verdict, f"{numbers}; {_plural(len(gains), 'seed')}")


def _score(rows: Sequence[Record], task: str, arm: str, seed: int) -> float:
    """Mean over the settings that are judged."""
    scores = [select.setting_score(rows, task, name, arm, seed) for name in select.judged_settings(rows, task)]
    return sum(scores) / len(scores)


def _common_seeds(rows: Sequence[Record], tasks: Sequence[str], other: str) -> list[int]:
    """Seeds with which both arms were trained on every setting of these tasks that is judged."""
    settings = {task: select.judged_settings(rows, task) for task in tasks}
    if not all(settings.values()):
        return []
    found = (
        set(select.seeds_of(rows, task, name, arm))
        for task, names in settings.items()
        for name in names
        for arm in ("exact-flow", other)
    )
    return sorted(set.intersection(*found))


def _by(ours: Spread, theirs: Spread, digits: int = 1) -> str:
    difference = 100 * (ours.mean - theirs.mean)
    return "" if math.isnan(difference) else f": {difference:+.{digits}f} points"


def _seeds(ours: Spread) -> str:
    return _plural(ours.n, "seed") + (" (no verdict)" if ours.n < 2 else "")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def text_summary(rows: Sequence[Record]) -> str:
    """Scores in percent per setting and arm, the claims, and what may be compared, as plain text."""
    cells = select.runs(rows)
    if not cells:
        return "no finished cells yet"
    arms = select.arms_of(rows)
    names = {task: select.settings_of(rows, task) for task in select.tasks_of(rows)}
    width = 2 + max(len(f"{task}, {name}") for task, settings in names.items() for name in settings)
    lines = ["reference accuracy in %, best of the rates, mean ± deviation over seeds"]
    lines.append(" " * width + "".join(f"{arm:>18}" for arm in arms))
    for task, settings in names.items():
        for name in settings:
            values = [select.setting_spread(rows, task, name, arm).text(100) for arm in arms]
            lines.append(f"{f'{task}, {name}':<{width}}" + "".join(f"{value:>18}" for value in values))
    overall = [select.overall_score(rows, arm) for arm in arms]
    if any(math.isfinite(value) for value in overall):
        shown = ["–" if math.isnan(value) else f"{100 * value:.1f}" for value in overall]  # noqa: RUF001
        lines.append(f"{'mean of task scores':<{width}}" + "".join(f"{value:>18}" for value in shown))
    dropped = {arm: select.nonfinite(rows, arm) for arm in arms}
    lines += [f"{arm}: {_plural(count, 'run')} dropped, not finite" for arm, count in dropped.items() if count]
    lines += ["", *claims_text(claims(rows)), "", comparability(rows)]
    return "\n".join(lines)
