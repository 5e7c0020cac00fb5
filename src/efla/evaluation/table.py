"""The paper's table from the rows of an evaluation: for the terminal, as markdown, for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from efla.evaluation.columns import (
    ACCURACIES,
    COLUMNS,
    EXTRA_COLUMNS,
    PRINTED_AVERAGES,
    Column,
    mean_accuracy,
    paper_rows,
)
from efla.runs.records import Record, number

PAPER_SIZES = ("none", "340M", "1.3B", "both")


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, with its standard error; ``is_best`` among the evaluated models of its line."""

    text: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class ResultTable:
    """A line per metric: title, chance, one cell per model; ``headings`` are the columns' titles."""

    headings: list[str]
    lines: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def texts(self, mark: str = "**") -> list[list[str]]:
        return [[f"{mark}{c.text}{mark}" if c.is_best else c.text for c in line] for line in self.lines]


def result_table(rows: Sequence[Record], paper: str = "340M") -> ResultTable:
    """Metrics as lines; the models' columns, then the paper's.

    The best of at least two models that differ is marked, per line. The mean is recomputed from the nine accuracies, in the
    paper's columns too, and printed only where all nine are there. Its standard error adds the tasks' up in squares.
    """
    cells = [row for row in rows if row.get("row") == "cell"]
    models = list(dict.fromkeys(str(row["model"]) for row in cells))
    by_cell = {(str(row["model"]), str(row["task"])): row for row in cells}
    published = _published(paper)
    lines = [
        _line(column, models, by_cell, published)
        for column in COLUMNS
        if any((model, column.task) in by_cell for model in models)
    ]
    lines += _mean_lines(models, by_cell, published)
    lines += [
        _line(column, models, by_cell, {name: {} for name in published})
        for column in EXTRA_COLUMNS
        if any((model, column.task) in by_cell for model in models)
    ]
    other = [row for row in cells if row["task"] not in {c.task for c in (*COLUMNS, *EXTRA_COLUMNS)}]
    for task, metric in dict.fromkeys((str(row["task"]), metric) for row in other for metric in row["metrics"]):
        column = Column(task, f"{task} {metric}", task, metric, 1.0, None, False, False)
        lines.append(_line(column, models, by_cell, {name: {} for name in published}))
    headings = ["", "chance", *models, *(f"paper: {name}" for name in published)]
    return ResultTable(headings, lines, _notes(cells, published))


def shown_values(row: Mapping[str, Any], column: Column) -> tuple[float, float]:
    """A metric of a row and its standard error, in the unit of the table."""
    value = number(row["metrics"].get(column.metric))
    return value * column.unit, number(row["standard_errors"].get(column.metric)) * column.unit


def _line(
    column: Column,
    models: Sequence[str],
    by_cell: Mapping[tuple[str, str], Record],
    published: Mapping[str, Mapping[str, float]],
) -> list[Cell]:
    values = {m: shown_values(by_cell[m, column.task], column) for m in models if (m, column.task) in by_cell}
    finite = [value for value, _ in values.values() if math.isfinite(value)]
    best = (min(finite) if column.lower_is_better else max(finite)) if len(set(finite)) > 1 else None
    digits = 1 if column.is_accuracy else 3 if "bits" in column.metric else 2
    line = [Cell(column.title), Cell("" if column.chance is None else f"{column.chance:.1f}")]
    for model in models:
        value, error = values.get(model, (math.nan, math.nan))
        if model not in values:
            line.append(Cell("–"))  # noqa: RUF001
        else:
            line.append(Cell(_with_error(value, error, digits), value == best))
    return line + [Cell(_plain(row.get(column.key), digits)) for row in published.values()]


def _mean_lines(
    models: Sequence[str],
    by_cell: Mapping[tuple[str, str], Record],
    published: Mapping[str, Mapping[str, float]],
) -> list[list[Cell]]:
    """The mean of the nine accuracies of every model that has all nine; the paper's printed average below its own."""
    means: dict[str, tuple[float, float]] = {}
    for model in models:
        pairs = {c.key: shown_values(by_cell[model, c.task], c) for c in ACCURACIES if (model, c.task) in by_cell}
        mean = mean_accuracy({key: value for key, (value, _) in pairs.items()})
        if mean is not None:
            means[model] = (mean, math.sqrt(sum(error**2 for _, error in pairs.values())) / len(pairs))
    if not means:
        return []
    best = max(mean for mean, _ in means.values()) if len({mean for mean, _ in means.values()}) > 1 else None
    chance = sum(column.chance or 0.0 for column in ACCURACIES) / len(ACCURACIES)
    line = [Cell("mean of the 9"), Cell(f"{chance:.1f}")]
    for model in models:
        line.append(Cell(_with_error(*means[model], 2), means[model][0] == best) if model in means else Cell("–"))  # noqa: RUF001
    line += [Cell(_plain(mean_accuracy(row), 2)) for row in published.values()]
    if not published:
        return [line]
    printed = [Cell("average as printed"), *[Cell()] * (1 + len(models))]
    printed += [Cell(_plain(row.get("printed"), 1)) for row in published.values()]
    return [line, printed]


def _published(paper: str) -> dict[str, dict[str, float]]:
    sizes = {"none": (), "340M": ("340M",), "1.3B": ("1.3B",), "both": ("340M", "1.3B")}[paper]
    return {
        f"{model} {size}": {**row, "printed": PRINTED_AVERAGES[size][model]}
        for size in sizes
        for model, row in paper_rows(size).items()
    }


def _notes(cells: Sequence[Record], published: Mapping[str, object]) -> list[str]:
    notes = ["± is one standard error over the items of a set; it knows nothing of seeds."]
    partial = sorted({str(row["task"]) for row in cells if row["num_items"] < row["num_items_in_set"]})
    if partial:
        notes.append(f"Only the first items were scored of: {', '.join(partial)}.")
    if published:
        notes.append(
            "The paper's models were trained on 8B (340M) and 50B (1.3B) tokens of SlimPajama: compare sizes and data "
            "before numbers. The mean is recomputed; DeltaNet 340M is printed as 42.2 but its row's mean is 43.11."
        )
    accuracies = {c.task: c for c in ACCURACIES if c.task != "lambada_openai"}
    judged = [
        abs(value - float(accuracies[str(row["task"])].chance or 0)) <= 2 * error
        for row in cells
        if str(row["task"]) in accuracies
        for value, error in [shown_values(row, accuracies[str(row["task"])])]
        if math.isfinite(error)
    ]
    if judged and sum(judged) > len(judged) / 2:
        notes.append(
            f"{sum(judged)} of the {len(judged)} multiple-choice accuracies lie within two standard errors of chance."
        )
    return notes


def markdown(table: ResultTable) -> str:
    """The table as GitHub markdown."""
    lines = ["| " + " | ".join(table.headings) + " |", "| --- " + "| ---: " * (len(table.headings) - 1) + "|"]
    lines += ["| " + " | ".join(line) + " |" for line in table.texts()]
    return "\n".join([*lines, "", *table.notes])


def terminal(table: ResultTable) -> Any:
    """The table for a rich console."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="lm-evaluation-harness, zero-shot", caption="\n".join(table.notes), caption_justify="left")
    for index, heading in enumerate(table.headings):
        words = heading.replace("paper: ", "paper:\n").replace(" 340M", "\n340M").replace(" 1.3B", "\n1.3B")
        shown.add_column(Text(words), justify="left" if index == 0 else "right", no_wrap=True)
    for line in table.lines:
        shown.add_row(*(Text(cell.text, style="bold" if cell.is_best else "") for cell in line))
    return shown


def _with_error(value: float, error: float, digits: int) -> str:
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"
    if not math.isfinite(error):
        return text
    return f"{text} ± {error:,.{digits}f}" if abs(value) < 1e6 else f"{text} ± {error:.1g}"


def _plain(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
