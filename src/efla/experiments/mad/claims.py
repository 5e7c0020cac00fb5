"""The paper's claims about MAD judged from rows, and the terminal's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from efla.experiments.framework.experiment import Record
from efla.experiments.framework.statistics import (
    NOT_JUDGED,
    NOT_SEEN,
    REVERSED,
    SEEN,
    Claim,
    Spread,
    claims_text,
    compare,
    effect,
    spread,
)
from efla.experiments.mad import select
from efla.experiments.mad.config import TASK_ORDER
from efla.experiments.mad.published import PAPER, comparability

PAIRS = {
    "delta-l2": "exact-flow against delta-l2 (DeltaNet as in flash-linear-attention; rule and key norm differ)",
    "delta-raw": "exact-flow against delta-raw (the rule alone differs)",
}
MOST = ("memorization", "compression")
_EACH = "EFLA is better than DeltaNet on all six tasks"
_MEAN = f"EFLA's average over the six tasks is {PAPER['EFLA'] - PAPER['DeltaNet']:.1f} points higher"
_MOST = "The gain is largest on Memorize and Compress"


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) per task, (b) on the average and (c) on the largest gains, on each task's baseline setting over seeds."""
    found = []
    arms = select.arms_of(rows)
    others = [other for other in PAIRS if other in arms and "exact-flow" in arms]
    for other in others:
        found += [_task_claim(rows, task, other) for task in select.tasks_of(rows) if _both(rows, task, other)]
    for other in others:
        if all(_both(rows, task, other) for task in TASK_ORDER):
            found += [_mean_claim(rows, other), _most_claim(rows, other)]
    return found


def _task_claim(rows: Sequence[Record], task: str, other: str) -> Claim:
    setting = select.judged_setting(rows, task)
    assert setting is not None
    ours, theirs = (select.setting_spread(rows, task, setting, arm) for arm in ("exact-flow", other))
    numbers = f"{ours.text(100)} % against {theirs.text(100)} %{_by(ours, theirs)}, {_seeds(ours, theirs)}"
    return Claim("a", _EACH, f"{task}, {setting}: {PAIRS[other]}", compare(ours, theirs), numbers, effect(ours, theirs))


def _mean_claim(rows: Sequence[Record], other: str) -> Claim:
    ours, theirs = _mean_over_tasks(rows, "exact-flow", other), _mean_over_tasks(rows, other, "exact-flow")
    numbers = (
        f"{ours.text(100, 2)} % against {theirs.text(100, 2)} %{_by(ours, theirs, 2)} "
        f"(paper: {PAPER['EFLA']} against {PAPER['DeltaNet']}), {_seeds(ours, theirs)}"
    )
    return Claim("b", _MEAN, PAIRS[other], compare(ours, theirs), numbers, effect(ours, theirs))


def _most_claim(rows: Sequence[Record], other: str) -> Claim:
    """Seen if the smaller gain on the two tasks exceeds the largest gain elsewhere by more than its spread over seeds."""
    gains = [
        {task: _score(rows, task, "exact-flow", seed) - _score(rows, task, other, seed) for task in TASK_ORDER}
        for seed in _common_seeds(rows, other)
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
    order = sorted(TASK_ORDER, key=lambda task: -means[task].mean)
    numbers = "gain in points: " + ", ".join(f"{task} {means[task].text(100)}" for task in order)
    return Claim("c", _MOST, PAIRS[other], verdict, f"{numbers}; {_plural(len(gains), 'seed')}")


def _score(rows: Sequence[Record], task: str, arm: str, seed: int) -> float:
    setting = select.judged_setting(rows, task)
    assert setting is not None
    return select.setting_score(rows, task, setting, arm, seed)


def _mean_over_tasks(rows: Sequence[Record], arm: str, other: str) -> Spread:
    seeds = _common_seeds(rows, other if arm == "exact-flow" else arm)
    return spread(sum(_score(rows, task, arm, seed) for task in TASK_ORDER) / len(TASK_ORDER) for seed in seeds)


def _common_seeds(rows: Sequence[Record], other: str) -> list[int]:
    """Seeds with which both arms were trained on every task's baseline."""
    seeds: set[int] | None = None
    for task in TASK_ORDER:
        setting = select.judged_setting(rows, task)
        assert setting is not None
        for arm in ("exact-flow", other):
            mine = set(select.seeds_of(rows, task, setting, arm))
            seeds = mine if seeds is None else seeds & mine
    return sorted(seeds or ())


def _both(rows: Sequence[Record], task: str, other: str) -> bool:
    setting = select.judged_setting(rows, task)
    return setting is not None and all(select.seeds_of(rows, task, setting, arm) for arm in ("exact-flow", other))


def _by(ours: Spread, theirs: Spread, digits: int = 1) -> str:
    difference = 100 * (ours.mean - theirs.mean)
    return "" if math.isnan(difference) else f": {difference:+.{digits}f} points"


def _seeds(ours: Spread, theirs: Spread) -> str:
    counted = min(ours.n, theirs.n)
    return _plural(counted, "seed") + (" (no verdict)" if counted < 2 else "")


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
    lines += ["", *claims_text(claims(rows)), "", comparability(cells[0]["profile"])]
    return "\n".join(lines)
