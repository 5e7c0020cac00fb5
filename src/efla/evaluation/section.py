"""The evaluation sections of the report: the paper's table, and long contexts."""

import math
from collections.abc import Sequence
from dataclasses import replace

from efla.evaluation.plot import line_keys, style
from efla.evaluation.table import COLUMNS, EXTRA_COLUMNS, ResultTable, TableCell, result_table
from efla.runs.chart import Chart, Point, Series
from efla.runs.records import Record, number
from efla.runs.sections import Figure, Section, Table, budget, settings_table

_LATE = 256
"""A second chart shows the positions after this one, where the loss changes slowly."""


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """The table of an evaluation with the paper's numbers."""
    cells = [row for row in rows if row["row"] == "cell"]
    table = result_table(rows, "both")
    models = list(dict.fromkeys(str(row["model"]) for row in cells))
    return [
        Section(
            key="evaluation",
            title="Language models: the paper's table",
            source=source,
            intro=(
                "lm-evaluation-harness, zero-shot: perplexities (lower is better) and accuracies in percent with one standard "
                "error over items, chance, and the paper's own numbers. The best of the evaluated models is bold."
            ),
            tables=[_table("Zero-shot results", table), _models(cells), _path(cells)],
            settings=settings_table(cells),
            data=_data(cells),
            budget=budget(cells),
            not_concluded=_not_concluded(cells, models, table),
        )
    ]


def length_sections(rows: Sequence[Record], source: str) -> list[Section]:
    """Loss by position and associative recall."""
    cells = [row for row in rows if row["row"] == "cell"]
    keys = line_keys(rows)
    figures = []
    positions = [row for row in rows if row["row"] == "position"]
    if positions:
        figures.append(_positions_figure(positions, keys))
    probes = [row for row in rows if row["row"] == "recall"]
    for varied, fixed in (("num_pairs", "length"), ("length", "num_pairs")):
        if probes:
            figures.append(_recall_figure(probes, keys, varied, fixed))
    steps = max((int(row.get("steps", 0)) for row in probes), default=0)
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
            intro=(
                "Bits per byte against the position in a text, the state carried from its first token, and recall of key-value "
                "pairs (MQAR)" + (f", after {steps} steps of training on recall." if steps else ".")
            ),
            figures=figures,
            tables=[_models(cells)],
            settings=settings_table(cells),
            data=[f"Text: {cells[0]['config']['text']}."],
            budget=budget(cells),
            not_concluded=limits,
        )
    ]


def _table(title: str, table: ResultTable) -> Table:
    return Table(title, table.headings, [[_shown(cell) for cell in line] for line in table.lines])


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
    return Table("Models", headings, lines, wide=True)


def _path(cells: Sequence[Record]) -> Table:
    """How many items of each task, how they were scored, and how long it took."""
    lines = [
        [str(row["model"]), str(row["task"]), f"{row['num_items']:,} of {row['num_items_in_set']:,}", str(row["path"]),
         f"{float(row['wall_seconds']):.1f} s"]
        for row in cells
    ]  # fmt: skip
    return Table("Items and time", ["model", "task", "items", "scored", "time"], lines, wide=True)


def _data(cells: Sequence[Record]) -> list[str]:
    sources = sorted({str(row["data"]) for row in cells})
    tasks = sorted({str(row["task"]) for row in cells})
    return [f"{', '.join(tasks)} from {' and '.join(sources)}."]


def _not_concluded(cells: Sequence[Record], models: Sequence[str], table: ResultTable) -> list[str]:
    found = list(table.notes[1:])
    largest = max(int(row["parameters"]) for row in cells)
    if largest < 300e6:
        found.insert(
            0,
            f"Anything about the paper's numbers: the largest model here has {largest:,} parameters, the paper's 340 million "
            "and more. At such a size accuracies are at chance; the table shows that the code path works.",
        )
    if len(models) > 1:
        found.append(
            "That a difference within two standard errors is one; efla eval --compare pairs the items and is sharper."
        )
    done = {str(row["task"]) for row in cells}
    left = [column.title for column in (*COLUMNS, *EXTRA_COLUMNS) if column.task not in done]
    if left:
        found.append(f"Anything about columns that were not run: {', '.join(left)}.")
    return found


def _positions_figure(rows: Sequence[Record], keys: dict[str, str]) -> Figure:
    series = []
    for model, key in keys.items():
        own = [row for row in rows if row["model"] == model]
        points = []
        for row in own:
            value, bits = number(row["bits_per_byte"]), number(row["bits_per_token"])
            error = number(row["standard_error"]) * (value / bits if bits else 1.0)
            error = error if math.isfinite(error) else 0.0
            points.append(
                Point(
                    float(row["end"]), value, value - error, value + error, f"{value:.3f} ± {error:.3f} bits per byte"
                )
            )
        if points:
            series.append(_series(model, key, points))
    charts = [_positions_chart("All positions", series)]
    late = [replace(s, points=[point for point in s.points if point.x > _LATE]) for s in series]
    if any(len(s.points) > 1 for s in late):
        charts.append(_positions_chart(f"From position {_LATE + 1} on", late))
    note = "Mean over stretches of the text; the band is one standard error."
    return Figure("Loss by position, state carried", note, charts, [_series(s.label, s.key, []) for s in series])


def _positions_chart(title: str, series: Sequence[Series]) -> Chart:
    ends = [end for s in series for point in s.points for end in (point.low, point.high) if math.isfinite(end)]
    ticks = sorted({point.x for s in series for point in s.points})
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    margin = 0.05 * (high - low)
    y_range = (low - margin, high + margin)
    return Chart(title, "position", "bits per byte", series, y_range, log_x=True, x_ticks=ticks[:: 1 + len(ticks) // 8])


def _recall_figure(rows: Sequence[Record], keys: dict[str, str], varied: str, fixed: str) -> Figure:
    names = {"num_pairs": "pairs", "length": "length"}
    charts, legend = [], {}
    for value in sorted({int(row[fixed]) for row in rows}):
        here = [row for row in rows if int(row[fixed]) == value]
        series = []
        for model, key in keys.items():
            own = sorted((row for row in here if row["model"] == model), key=lambda row: int(row[varied]))
            points = []
            for row in own:
                share, error = 100 * number(row["among_values"]), 100 * number(row["among_values_error"])
                error = error if math.isfinite(error) else 0.0
                text = f"{share:.1f} ± {error:.1f} % (chance {100 * number(row['chance']):.1f})"
                points.append(Point(float(row[varied]), share, share - error, share + error, text))
            if points:
                series.append(_series(model, key, points))
                legend[model] = _series(model, key, [])
        ticks = sorted({float(row[varied]) for row in here})
        title = f"{value:,} tokens" if fixed == "length" else f"{value} pairs"
        charts.append(
            Chart(title, names[varied], "recall among the values, %", series, (0, 102), log_x=True, x_ticks=ticks)
        )
    return Figure(
        f"Associative recall against {names[varied]}",
        "Right answers among the values of the sequence; chance is one over the pairs. The band is one standard error.",
        charts,
        list(legend.values()),
    )


def _series(model: str, key: str, points: Sequence[Point]) -> Series:
    _, dash, width = style(key)
    return Series(key, model, points, dash, width)
