"""The section of the report on the exactness study."""

import math
from collections.abc import Sequence

from efla.experiments.exactness.claims import by_study, claims, table
from efla.experiments.exactness.config import UNGATED
from efla.runs.chart import Chart, Point, Series, tidy
from efla.runs.records import Record, number
from efla.runs.sections import Figure, Section, Table, budget, settings_table
from efla.runs.statistics import Rows
from efla.runs.style import RULES


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: four charts and the table of orders."""
    cells, lines = Rows(rows).cells(), table(rows)
    columns, orders = list(lines[0]) if lines else [], [list(line.values()) for line in lines]
    legend = [_series(rule, [], []) for rule in by_study(rows, "order")]
    note = "Error against torch.linalg.matrix_exp in float64. Curves that end in d overflow float32 at the next scale."
    return [
        Section(
            key="exactness",
            title="What an exact step buys",
            source=source,
            intro="A token is one step of size x = βλ along the delta rule's differential equation. "
            "Each rule is compared with the true flow.",
            claims=claims(rows),
            figures=[Figure("Every rule against the true flow", note, _charts(rows), legend)],
            tables=[Table("Measured orders and limits", columns, orders)] if lines else [],
            settings=settings_table(cells),
            data=["Random tokens drawn from fixed seeds; no data set."],
            budget=budget(cells),
            not_concluded=[
                "That a smaller error per step makes a better model: a network trained with the Euler step adapts to it.",
                "Anything about DeltaNet with L2-normalised keys beyond x = β < 1: its keys never reach the unstable region.",
            ],
        )
    ]


def _charts(rows: Sequence[Record]) -> list[Chart]:
    order = by_study(rows, "order")
    stability, memory = (
        {rule: row for rule, row in by_study(rows, study).items() if rule in UNGATED}
        for study in ("stability", "memory")
    )
    size, charts = "step size x = βλ", []
    if order:
        drawn = [_series(rule, row["x"], row["error"]) for rule, row in order.items()]
        title = "a  Error of one token's step"
        charts.append(Chart(title, size, "relative error", drawn, (1e-17, 1e4), log_x=True, log_y=True))
    if stability:
        drawn = [
            _series(rule, *zip(*((x, f) for x, f in zip(row["x"], row["factor"], strict=True) if x <= 8), strict=True))
            for rule, row in stability.items()
        ]
        charts.append(Chart("b  Factor along the key in one step", size, "factor R(x)", drawn, (-2.5, 2.5)))
    if memory:
        drawn = [_series(rule, range(len(row["norm"])), row["norm"]) for rule, row in memory.items()]
        title = "c  A burst of energetic keys"
        charts.append(Chart(title, "token", "norm of the memory", drawn, (0.1, 1e15), log_y=True))
        drawn = [_series(rule, row["scale"], row["largest_norm"]) for rule, row in memory.items()]
        title, scale, ticks = "d  All keys scaled up (float32)", "keys multiplied by", [1, 2, 4, 8, 16, 32, 64]
        charts.append(Chart(title, scale, "largest norm", drawn, (0.01, 1e39), log_x=True, log_y=True, x_ticks=ticks))
    return charts


def _series(rule: str, x: Sequence[float], y: Sequence[object]) -> Series:
    drawn = []
    for at, value in zip(x, map(number, y), strict=True):
        finite = math.isfinite(value)
        drawn.append(
            Point(float(at), value if finite else math.nan, value, value, tidy(value) if finite else "overflow")
        )
    line = RULES[rule]
    return Series(rule, line.label, drawn, line.dash, line.width)
