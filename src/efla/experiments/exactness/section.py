"""The section of the report on the exactness study."""

import math
from collections.abc import Sequence

from efla.experiments.exactness.claims import by_study, claims, table
from efla.experiments.exactness.config import UNGATED
from efla.runs.chart import Chart, Figure, Guide, Point, Series, tidy
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.sections import Section, Table, budget, settings_table
from efla.runs.statistics import Rows

_ROUNDING = 1e-17
"""Smaller errors are drawn at this one: a logarithmic axis has no zero."""


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: four charts and the table of orders."""
    cells, lines = Rows(rows).cells(), table(rows)
    columns = list(lines[0]) if lines else []
    orders = [list(line.values()) for line in lines]
    note = "Error against torch.linalg.matrix_exp in float64. Curves that end in d overflow float32 at the next scale."
    return [
        Section(
            key="exactness",
            title="What an exact step buys",
            source=source,
            question="What does solving a token's step exactly change, before any model is trained?",
            intro="A token is one step of size x = βλ along the delta rule's differential equation. "
            "Each rule is compared with the true flow.",
            claims=claims(rows),
            figures=[Figure("exactness", "Every rule against the true flow", note, _charts(rows))],
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
        errors = {rule: [max(number(e), _ROUNDING) for e in row["error"]] for rule, row in order.items()}
        drawn = [_series(rule, row["x"], errors[rule]) for rule, row in order.items()]
        title = "a  Error of one token's step"
        charts.append(Chart(title, size, "relative error", drawn, (_ROUNDING, 1e4), log_x=True, log_y=True))
    if stability:
        drawn = [
            _series(rule, *zip(*((x, f) for x, f in zip(row["x"], row["factor"], strict=True) if x <= 8), strict=True))
            for rule, row in stability.items()
        ]
        guides = [Guide("y", 1, "memory grows outside the dashed lines"), Guide("y", -1)]
        title = "b  Factor along the key in one step"
        charts.append(Chart(title, size, "factor R(x)", drawn, (-2.5, 2.5), guides=guides))
    if memory:
        config = next(iter(memory.values()))["config"]
        start, tokens = config["burst_start"], config["burst_tokens"]
        drawn = [_series(rule, range(len(row["norm"])), row["norm"]) for rule, row in memory.items()]
        title = "c  A burst of energetic keys"
        text = f"between the dashed lines: {tokens} keys with x = {config['beta'] * config['burst_energy']:g}"
        guides = [Guide("x", start, text), Guide("x", start + tokens)]
        charts.append(Chart(title, "token", "norm of the memory", drawn, (0.1, 1e15), log_y=True, guides=guides))
        drawn = [_series(rule, row["scale"], row["largest_norm"]) for rule, row in memory.items()]
        lost = {one.key: [float(p.x) for p in one.points if not math.isfinite(p.y)] for one in drawn}
        ends = [(key, at[0]) for key, at in lost.items() if at]
        title = "d  All keys scaled up (× overflows float32)"  # noqa: RUF001
        powers = [2.0**i for i in range(7)]
        charts.append(
            Chart(title, "keys multiplied by", "largest norm", drawn, (0.01, 1e39), log_x=True, log_y=True, x_ticks=powers,
                  crosses=ends)
        )  # fmt: skip
    return charts


def _series(rule: str, x: Sequence[float], y: Sequence[object]) -> Series:
    values = [(float(at), number(value)) for at, value in zip(x, y, strict=True)]
    points = [Point(at, value, text=tidy(value) if math.isfinite(value) else "overflow") for at, value in values]
    return Series(rule, name_of(rule), points)
