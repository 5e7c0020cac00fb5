"""The results of the exactness study, from rows: table, the paper's claims, summary for the terminal.

Only the inputs are random, so the numbers have no spread over seeds.
"""

import math
from collections.abc import Sequence

from efla.experiments.exactness.config import RULES
from efla.runs.records import Record, number
from efla.runs.statistics import NOT_SEEN, SEEN, Claim, Rows

ROUNDING = 1e-12
"""Relative error below which a float64 step counts as exact."""
_EXACT = "The closed form removes the Euler error of a token's step"
_STABLE = "The exact transition never expands the memory, whatever the key's norm"
_PAIRS = (("efla", "delta"), ("gated_efla", "gated_delta"))


def by_study(rows: Sequence[Record], study: str) -> dict[str, Record]:
    """The rows of one study by rule, in the order of the legend."""
    cells = Rows(rows).cells().where(study=study)
    return {rule: cells.where(rule=rule)[-1] for rule in cells.values("rule", RULES)}


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on the error against the matrix exponential and (b) on the factor along the key, for both families."""
    order, stability = by_study(rows, "order"), by_study(rows, "stability")
    found = []
    for ours, theirs in _PAIRS:
        if ours in order and theirs in order:
            a, b = (max(number(error) for error in order[rule]["error"]) for rule in (ours, theirs))
            low, high = min(order[ours]["x"]), max(order[ours]["x"])
            text = f"largest relative error {a:.1e} against {b:.1e} for step sizes from {low:g} to {high:g}, float64"
            found.append(Claim("a", _EXACT, f"{ours} against {theirs}", SEEN if a < ROUNDING < b else NOT_SEEN, text))
    for ours, theirs in _PAIRS:
        if ours in stability and theirs in stability:
            a, b = (number(stability[rule]["stability_limit"]) for rule in (ours, theirs))
            searched = number(stability[ours]["searched_to"])
            text = f"no step size up to {searched:g} expands" if math.isinf(a) else f"expands beyond {a:.3g}"
            text += ", against none" if math.isinf(b) else f", against beyond {b:.3g}"
            verdict = SEEN if math.isinf(a) and not math.isinf(b) else NOT_SEEN
            found.append(Claim("b", _STABLE, f"{ours} against {theirs}", verdict, text))
    return found


def table(rows: Sequence[Record]) -> list[dict[str, str]]:
    """Per rule: order declared and measured, error at x = 1, stability limit, memory before and after the burst."""
    order, stability, memory = (by_study(rows, study) for study in ("order", "stability", "memory"))
    lines = []
    for rule in (rule for rule in order if rule in stability and rule in memory):
        limit = number(stability[rule]["stability_limit"])
        unlimited = f"any (tried {stability[rule]['searched_to']:.0e})"
        after = number(memory[rule]["norm_after_burst"])
        lines.append(
            {
                "rule": rule,
                "order declared": _order(number(order[rule]["declared_order"])),
                "order measured": _order(number(order[rule]["measured_order"])),
                "error at x = 1": f"{number(order[rule]['error_at_1']):.1e}",
                "stable up to x": f"{limit:.3f}" if math.isfinite(limit) else unlimited,
                "‖S‖ before burst": f"{number(memory[rule]['norm_before_burst']):.2f}",
                "‖S‖ after burst": f"{after:.2f}" if after < 100 else f"{after:.3g}",
            }
        )
    return lines


def _order(order: float) -> str:
    return "exact" if math.isinf(order) else f"{order:.2f}" if order != round(order) else f"{order:.0f}"


def text_summary(rows: Sequence[Record]) -> str:
    """The table as plain text, and how far the closed form and the matrix exponential agree."""
    lines = table(rows)
    if not lines:
        return "no finished cells yet"
    widths = {key: max(len(key), *(len(line[key]) for line in lines)) for key in lines[0]}
    text = ["  ".join(f"{key:<{widths[key]}}" for key in widths)]
    text.append("  ".join("-" * width for width in widths.values()))
    text += ["  ".join(f"{line[key]:<{widths[key]}}" for key in widths) for line in lines]
    worst = max(number(row["closed_form_against_matrix_exp"]) for row in by_study(rows, "order").values())
    text.append(f"closed form against torch.linalg.matrix_exp (float64): largest relative difference {worst:.1e}")
    return "\n".join(text)
