"""The exactness study's section of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from efla.experiments.exactness.claims import claims
from efla.experiments.exactness.plot import by_study, table
from efla.runs.chart import Chart, Point, Series, tidy
from efla.runs.records import Record, number
from efla.runs.sections import Figure, Section, Table, budget, settings_table
from efla.runs.style import RULES

_UNGATED = ("delta", "rk2", "rk4", "implicit_euler", "crank_nicolson", "efla")


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """Four charts, the table of orders."""
    cells = [row for row in rows if row.get("row") == "cell"]
    order, stability, memory = (by_study(rows, study) for study in ("order", "stability", "memory"))
    charts = []
    if order:
        drawn = [_series(rule, row["x"], row["error"]) for rule, row in order.items()]
        charts.append(
            Chart(
                "a  Error of one token's step",
                "step size x = βλ",
                "relative error",
                drawn,
                (1e-17, 1e4),
                log_x=True,
                log_y=True,
            )
        )
    if stability:
        drawn = [
            _series(rule, *zip(*((x, f) for x, f in zip(row["x"], row["factor"], strict=True) if x <= 8), strict=True))
            for rule, row in stability.items() if rule in _UNGATED
        ]  # fmt: skip
        charts.append(
            Chart("b  Factor along the key in one step", "step size x = βλ", "factor R(x)", drawn, (-2.5, 2.5))
        )
    if memory:
        ungated = {rule: row for rule, row in memory.items() if rule in _UNGATED}
        drawn = [_series(rule, range(len(row["norm"])), row["norm"]) for rule, row in ungated.items()]
        charts.append(
            Chart("c  A burst of energetic keys", "token", "norm of the memory", drawn, (0.1, 1e15), log_y=True)
        )
        drawn = [_series(rule, row["scale"], row["largest_norm"]) for rule, row in ungated.items()]
        ticks = [1, 2, 4, 8, 16, 32, 64]
        charts.append(
            Chart(
                "d  All keys scaled up (float32)",
                "keys multiplied by",
                "largest norm",
                drawn,
                (0.01, 1e39),
                log_x=True,
                log_y=True,
                x_ticks=ticks,
            )
        )
    lines = table(rows)
    tables = (
        [Table("Measured orders and limits", list(lines[0]), [list(line.values()) for line in lines])] if lines else []
    )
    legend = [Series(rule, RULES[rule].label, [], RULES[rule].dash, RULES[rule].width) for rule in order]
    note = (
        "Error against torch.linalg.matrix_exp in float64; a curve that ends in d overflows float32 at the next scale."
    )
    return [
        Section(
            key="exactness",
            title="What an exact step buys",
            source=source,
            intro="A token is one step of size x = βλ along the delta rule's differential equation. "
            "Each rule is held to the true flow.",
            claims=claims(rows),
            figures=[Figure("Every rule against the true flow", note, charts, legend)],
            tables=tables,
            settings=settings_table(cells),
            data=["Random tokens drawn from fixed seeds; no data set."],
            budget=budget(cells),
            not_concluded=[
                "That a smaller error per step makes a better model: a network trained with the Euler step adapts to it.",
                "Anything about DeltaNet with L2-normalised keys beyond x = β < 1: its keys never reach the unstable region.",
            ],
        )
    ]


def _series(rule: str, x: Sequence[float], y: Sequence[object]) -> Series:
    values = [number(value) for value in y]
    line = RULES[rule]
    drawn = [
        Point(
            float(at),
            value if math.isfinite(value) else math.nan,
            value,
            value,
            tidy(value) if math.isfinite(value) else "overflow",
        )
        for at, value in zip(x, values, strict=True)
    ]
    return Series(rule, line.label, drawn, line.dash, line.width)
