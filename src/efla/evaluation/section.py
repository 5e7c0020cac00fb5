"""The evaluation sections of the report: the paper's table, and long contexts."""

import math
from collections.abc import Sequence

from efla.evaluation.table import COLUMNS, EXTRA_COLUMNS, ResultTable, TableCell, result_table
from efla.runs.chart import Chart, Figure, Point, Series
from efla.runs.names import LOOKS
from efla.runs.records import Record, number
from efla.runs.sections import Section, Table, budget, settings_table

_LATE = 256
"""A second chart shows the positions after this one, where the loss changes slowly."""
# Styles for other models, and for a second model with the same mixer.
_OTHERS = ("implicit_euler", "rk4", "rk2", "crank_nicolson", "delta-l2", "gated-delta", "gated-exact-flow")


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """The table of an evaluation with the paper's numbers."""
    cells = [row for row in rows if row["row"] == "cell"]
    table = result_table(rows, "both")
    tasks, sources = (sorted({str(row[key]) for row in cells}) for key in ("task", "data"))
    return [
        Section(
            key="evaluation",
            title="Language models: the paper's table",
            source=source,
            question="How do these models do on the paper's table?",
            intro=(
                "lm-evaluation-harness, zero-shot: perplexities (lower is better) and accuracies in percent with one standard "
                "error over items, chance, and the paper's own numbers. The best of the evaluated models is bold."
            ),
            tables=[
                Table("Zero-shot results", table.headings, [[_shown(cell) for cell in line] for line in table.lines]),
                _models(cells),
                _path(cells),
            ],
            settings=settings_table(cells),
            data=[f"{', '.join(tasks)} from {' and '.join(sources)}."],
            budget=budget(cells),
            not_concluded=_not_concluded(cells, table),
        )
    ]


def length_sections(rows: Sequence[Record], source: str) -> list[Section]:
    """Loss by position and associative recall."""
    cells = [row for row in rows if row["row"] == "cell"]
    probes = [row for row in rows if row["row"] == "recall"]
    steps = max((int(row["steps"]) for row in probes), default=0)
    limits = [
        "Anything about a trained length: positions past a model's own (in the table) are extrapolation.",
        "That a difference between two models is due to their mixers: one run each, seeds unknown.",
    ]
    if probes and not steps:
        limits.append("What an architecture could recall: these models were never trained to recall random tokens.")
    return [
        Section(
            key="length",
            title="Language models: long contexts",
            source=source,
            question="How well do these models use long contexts?",
            intro=(
                "Bits per byte against the position in a text, the state carried from its first token, and recall of key-value "
                "pairs (MQAR)" + (f", after {steps} steps of training on recall." if steps else ".")
            ),
            figures=length_figures(rows),
            tables=[_models(cells)],
            settings=settings_table(cells),
            data=[f"Text: {cells[0]['config']['text']}."],
            budget=budget(cells),
            not_concluded=limits,
        )
    ]


def _shown(cell: TableCell) -> str:
    from markupsafe import Markup, escape

    return Markup("<b>{}</b>").format(escape(cell.text)) if cell.is_best else cell.text


def _models(cells: Sequence[Record]) -> Table:
    known = {str(row["model"]): row for row in cells}
    lines = [
        [model, str(row["mixers"]), f"{row['parameters']:,}", f"{row['vocabulary']:,}", str(row["tokens"]),
         f"{row.get('trained_length', row.get('max_length', 0)):,}", str(row["digest"])]
        for model, row in known.items()
    ]  # fmt: skip
    headings = ["model", "mixers", "parameters", "vocabulary", "tokens", "length", "digest of the weights"]
    return Table("Models", headings, lines)


def _path(cells: Sequence[Record]) -> Table:
    """How many items of each task, how they were scored, and how long it took."""
    lines = [
        [str(row["model"]), str(row["task"]), f"{row['num_items']:,} of {row['num_items_in_set']:,}", str(row["path"]),
         f"{float(row['wall_seconds']):.1f} s"]
        for row in cells
    ]  # fmt: skip
    return Table("Items and time", ["model", "task", "items", "scored", "time"], lines)


def _not_concluded(cells: Sequence[Record], table: ResultTable) -> list[str]:
    found = list(table.notes[1:])
    largest = max(int(row["parameters"]) for row in cells)
    if largest < 300e6:
        found.insert(
            0,
            f"Anything about the paper's numbers: the largest model here has {largest:,} parameters, the paper's 340 million "
            "and more. At such a size accuracies are at chance; the table shows that the code path works.",
        )
    if len({row["model"] for row in cells}) > 1:
        found.append(
            "That a difference within two standard errors is real; efla eval --compare pairs the items and detects smaller ones."
        )
    done = {str(row["task"]) for row in cells}
    left = [column.title for column in (*COLUMNS, *EXTRA_COLUMNS) if column.task not in done]
    if left:
        found.append(f"Anything about columns that were not run: {', '.join(left)}.")
    return found


def line_keys(rows: Sequence[Record]) -> dict[str, str]:
    """The style of each model: that of its mixer if it is free."""
    mixers = {str(row["model"]): str(row.get("mixers", "")).split(" ")[0] for row in rows if row.get("row") == "cell"}
    found: dict[str, str] = {}
    for model, mixer in mixers.items():
        own = "attention" if mixer == "softmax" else mixer
        if own in LOOKS and own not in found.values():
            found[model] = own
    free = [key for key in _OTHERS if key not in found.values()]
    for index, model in enumerate(model for model in mixers if model not in found):
        found[model] = free[index % len(free)]
    return {model: found[model] for model in mixers}


def length_figures(rows: Sequence[Record]) -> list[Figure]:
    """Loss against position, and recall against pairs (a chart per length) and against length (per pairs)."""
    keys = line_keys(rows)
    positions, probes = ([row for row in rows if row["row"] == kind] for kind in ("position", "recall"))
    figures = [_positions_figure(positions, keys)] if positions else []
    for varied, fixed in (("num_pairs", "length"), ("length", "num_pairs")):
        figures += [_recall_figure(probes, keys, varied, fixed)] if probes else []
    return figures


def _positions_figure(rows: Sequence[Record], keys: dict[str, str]) -> Figure:
    series = []
    for model, key in keys.items():
        points = []
        for row in (row for row in rows if row["model"] == model):
            value, bits = number(row["bits_per_byte"]), number(row["bits_per_token"])
            error = number(row["standard_error"]) * (value / bits if bits else 1.0)
            points.append(_point(float(row["end"]), value, error, f"{value:.3f} ± {error:.3f}"))
        series.append(Series(key, model, points))
    charts = [_positions_chart("All positions", series)]
    late = [Series(one.key, one.label, [p for p in one.points if float(p.x) > _LATE]) for one in series]
    if any(len(one.points) > 1 for one in late):
        charts.append(_positions_chart(f"From position {_LATE + 1} on", late))
    note = "Mean over stretches of the text; the band is one standard error."
    return Figure("bits_by_position", "Loss by position, state carried", note, charts)


def _positions_chart(title: str, series: Sequence[Series]) -> Chart:
    ends = [end for one in series for p in one.points for end in (p.low, p.high) if math.isfinite(end)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    margin = 0.05 * (high - low)
    ticks = _thinned({float(p.x) for one in series for p in one.points})
    return Chart(title, "position", "bits per byte", series, (low - margin, high + margin), log_x=True, x_ticks=ticks)


def _recall_figure(rows: Sequence[Record], keys: dict[str, str], varied: str, fixed: str) -> Figure:
    name = {"num_pairs": "pairs", "length": "length"}[varied]
    charts = []
    for value in sorted({int(row[fixed]) for row in rows}):
        here = sorted((row for row in rows if int(row[fixed]) == value), key=lambda row: int(row[varied]))
        series = []
        for model, key in keys.items():
            points = []
            for row in (row for row in here if row["model"] == model):
                share, error = 100 * number(row["among_values"]), 100 * number(row["among_values_error"])
                points.append(_point(float(row[varied]), share, error, f"{share:.1f} ± {error:.1f} %", 100))
            series.append(Series(key, model, points))
        chance = {float(row[varied]): 100 * number(row["chance"]) for row in here}
        series.append(Series("chance", "chance", [Point(x, y, text=f"{y:.1f} %") for x, y in chance.items()]))
        title = f"{value:,} tokens" if fixed == "length" else f"{value} pairs"
        label = "recall among the values, %"
        charts.append(Chart(title, name, label, series, (0, 102), log_x=True, x_ticks=_thinned(set(chance))))
    note = (
        "Right answers among the values of the sequence; chance is one over the pairs. The band is one standard error."
    )
    return Figure(f"recall_by_{name}", f"Associative recall against {name}", note, charts)


def _point(x: float, value: float, error: float, text: str, top: float = math.inf) -> Point:
    """A value with its standard error; an unknown error has no band."""
    error = error if math.isfinite(error) else 0.0
    return Point(x, value, value - error, min(top, value + error), text)


def _thinned(values: set[float]) -> list[float]:
    """Ticks at the values, not more than nine."""
    ticks = sorted(values)
    return ticks[:: 1 + len(ticks) // 9]
