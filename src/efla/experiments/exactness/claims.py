"""The results of the exactness study, from rows: table, the paper's claims, summary for the terminal.

Only the inputs are random, so the numbers have no spread over seeds.
"""

import math
from collections.abc import Sequence

from efla.experiments.exactness.config import RULES
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.statistics import NOT_SEEN, SEEN, Claim, Rows
from efla.runs.text import claims_text, text_table

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
    errors, limits = [], []
    for ours, theirs in _PAIRS:
        pair = f"{name_of(ours)} against {name_of(theirs)}"
        if ours in order and theirs in order:
            a, b = (max(number(error) for error in order[rule]["error"]) for rule in (ours, theirs))
            low, high = min(order[ours]["x"]), max(order[ours]["x"])
            text = f"error at most {a:.0e} against {b:.0e} for βλ {low:g} to {high:g}"
            errors.append(Claim("a", _EXACT, pair, SEEN if a < ROUNDING < b else NOT_SEEN, text))
        if ours in stability and theirs in stability:
            a, b = (number(stability[rule]["stability_limit"]) for rule in (ours, theirs))
            searched = f"never expands up to βλ = {number(stability[ours]['searched_to']):g}"
            parts = (searched if math.isinf(limit) else f"beyond {limit:.3g}" for limit in (a, b))
            verdict = SEEN if math.isinf(a) and not math.isinf(b) else NOT_SEEN
            limits.append(Claim("b", _STABLE, pair, verdict, ", against ".join(parts)))
    return [*errors, *limits]


def table(rows: Sequence[Record]) -> list[dict[str, str]]:
    """Per rule: order declared and measured, error at x = 1, stability limit, memory before and after the burst."""
    order, stability, memory = (by_study(rows, study) for study in ("order", "stability", "memory"))
    lines = []
    for rule in (rule for rule in order if rule in stability and rule in memory):
        limit = number(stability[rule]["stability_limit"])
        unlimited = f"> {stability[rule]['searched_to']:.0e}"  # never expanded where it was tried
        after = number(memory[rule]["norm_after_burst"])
        lines.append(
            {
                "rule": name_of(rule),
                "declared order": _order(number(order[rule]["declared_order"])),
                "order": _order(number(order[rule]["measured_order"])),
                "error at x = 1": f"{number(order[rule]['error_at_1']):.1e}",
                "stable up to x": f"{limit:.3f}" if math.isfinite(limit) else unlimited,
                "‖S‖ before burst": f"{number(memory[rule]['norm_before_burst']):.2f}",
                "‖S‖ after burst": f"{after:.2f}" if after < 100 else f"{after:.3g}",
            }
        )
    return lines


def _order(order: float) -> str:
    return "exact" if math.isinf(order) else f"{order:.2f}" if order != round(order) else f"{order:.0f}"


def text_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """The claims and the table as plain text; verbose: all columns, and how far closed form and matrix exponential agree."""
    lines = table(rows)
    if not lines:
        return "no finished cells yet"
    columns = [key for key in lines[0] if verbose or not ("declared" in key or "before" in key)]
    text = text_table(columns, [[line[key] for key in columns] for line in lines])
    if verbose:
        worst = max(number(row["closed_form_against_matrix_exp"]) for row in by_study(rows, "order").values())
        text.append(f"closed form against torch.linalg.matrix_exp (float64): largest relative difference {worst:.1e}")
    return "\n".join([*text, "", *claims_text(claims(rows), verbose)])
