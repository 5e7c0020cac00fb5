"""The paper's claims about training cost judged from rows, and the terminal's summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from efla.experiments.throughput import select
from efla.experiments.throughput.config import PAIRS
from efla.runs.records import Record
from efla.runs.statistics import NOT_JUDGED, NOT_SEEN, SEEN, Claim, claims_text

NEAR = 0.05
"""What we take "nearly identical" to mean, which the paper does not say: a median ratio within 5 % of 1."""
_SPEED = "EFLA trains at nearly the same throughput as DeltaNet in all settings"
_PARAMETERS = "EFLA introduces no additional parameters"


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on throughput and (b) on parameters, for the pair and the gated pair."""
    found = []
    arms = select.arms_of(rows)
    pairs = [(ours, theirs) for ours, theirs in PAIRS.items() if ours in arms and theirs in arms]
    for ours, theirs in pairs:
        ratios = {select.name(row): select.ratio(row, ours, theirs) for row in select.cells(rows)}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        middle = statistics.median(ratio.median for ratio in known.values())
        if any(ratio.rounds < 5 for ratio in known.values()):
            verdict = NOT_JUDGED
        else:
            verdict = SEEN if all(abs(ratio.median - 1) <= NEAR for ratio in known.values()) else NOT_SEEN
        each = "; ".join(f"{name}: {ratio.text()}" for name, ratio in known.items())
        rounds = min(ratio.rounds for ratio in known.values())
        numbers = f"ratio {middle:.3f} over settings; {each} (median and quartiles of {rounds} rounds; near: within {NEAR:.0%})"
        found.append(Claim("a", _SPEED, f"{ours} over {theirs}, tokens per second", verdict, numbers))
    for ours, theirs in pairs:
        counts = {(row["arms"][ours]["parameters"], row["arms"][theirs]["parameters"]) for row in select.cells(rows)}
        text = "; ".join(f"{a:,} against {b:,}" for a, b in sorted(counts))
        verdict = SEEN if all(a == b for a, b in counts) else NOT_SEEN
        found.append(Claim("b", _PARAMETERS, f"{ours} against {theirs}", verdict, text))
    return found


def text_summary(rows: Sequence[Record]) -> str:
    """Tokens per second and memory by setting and arm, and the claims, as plain text."""
    cells = select.cells(rows)
    if not cells:
        return "no finished cells yet"
    config = cells[0]["config"]
    where = f"{cells[0]['device']}, {cells[0]['threads']} thread(s), {config['precision']}, size {config['size']}"
    lines = [f"training tokens per second (median and quartiles), length×batch; {where}"]  # noqa: RUF001
    lines.append(f"{'':<18}" + "".join(f"{select.name(row):>28}" for row in cells))
    for arm in select.arms_of(rows):
        values = [select.tokens_per_second(row, arm) for row in cells]
        lines.append(f"{arm:<18}" + "".join(f"{'' if v is None else v.text(0):>28}" for v in values))
    lines.append("useful operations per second, 10^9")
    for arm in select.arms_of(rows):
        rates = [select.operations(row, arm) for row in cells]
        lines.append(f"{arm:<18}" + "".join(f"{'' if v is None else f'{v / 1e9:,.1f}':>28}" for v in rates))
    lines.append("growth of memory in a step at its peak, MB")
    for arm in select.arms_of(rows):
        sizes = [select.memory(row, arm) for row in cells]
        lines.append(f"{arm:<18}" + "".join(f"{'not known' if v is None else f'{v / 1e6:,.0f}':>28}" for v in sizes))
    return "\n".join([*lines, "", *claims_text(claims(rows))])
