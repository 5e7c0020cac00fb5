"""The paper's claims about corrupted images, (a) and (b), judged from rows; and the terminal's summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from efla.experiments.smnist import select
from efla.experiments.smnist.select import Setting
from efla.runs.records import Record
from efla.runs.statistics import (
    NOT_JUDGED,
    NOT_SEEN,
    REVERSED,
    SEEN,
    Claim,
    claims_text,
    effect,
    judge,
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


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) and (b) at every setting and for both pairs. The verdict is on the mean over levels; levels follow."""
    found = []
    for kind, (letter, sentence) in _SENTENCES.items():
        for setting in select.settings_of(rows):
            for other in PAIRS:
                claim = _claim(rows, setting, kind, letter, sentence, other)
                if claim is not None:
                    found.append(claim)
    return found


def _claim(rows: Sequence[Record], setting: Setting, kind: str, letter: str, sentence: str, other: str) -> Claim | None:
    ours = select.kind_mean(rows, setting, "exact-flow", kind)
    theirs = select.kind_mean(rows, setting, other, kind)
    if ours.n == 0 or theirs.n == 0:
        return None
    verdict = judge(ours, theirs)
    levels, our_curve = select.level_curve(rows, setting, "exact-flow", kind)
    _, their_curve = select.level_curve(rows, setting, other, kind)
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
        chosen = [row for row in select.runs(rows) if (row["block"], row["rate"], row["arm"]) == (*setting, arm)]
        diverged = sum(bool(row["diverged"]) for row in chosen)
        if diverged:
            numbers += f"; {arm} diverged in training in {diverged} of {len(chosen)} runs"
    pair = f"{PAIRS[other]}; {setting.block} block, rate {setting.rate:g}"
    return Claim(letter, sentence, pair, verdict, numbers, effect(ours, theirs))


def text_summary(rows: Sequence[Record]) -> str:
    """Accuracy in percent per arm and level, and the claims, as plain text."""
    lines: list[str] = []
    for setting in select.settings_of(rows):
        lines.append(f"{setting.block} block, rate {setting.rate:g}: accuracy in %, mean over seeds")
        for kind in ("scale", "dropout", "noise"):
            lines += _table(rows, setting, kind)
        lines.append("")
    lines += claims_text(claims(rows))
    data = sorted({row["data"]["description"] for row in select.runs(rows)})
    return "\n".join([*lines, "", *(f"data: {description}" for description in data)])


def _table(rows: Sequence[Record], setting: Setting, kind: str) -> list[str]:
    lines: list[str] = []
    for arm in select.arms_of(rows):
        levels, curve = select.level_curve(rows, setting, arm, kind)
        if not levels:
            continue
        if not lines:
            lines.append(f"  {kind:<17}" + "".join(f"{level:>7g}" for level in levels))
        lines.append(f"    {arm:<15}" + "".join(f"{100 * point.mean:7.1f}" for point in curve))
    return lines
