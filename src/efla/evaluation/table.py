"""The paper's table: its columns and published numbers, and a table from the rows of an evaluation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from efla.runs.records import Record, number
from efla.runs.statistics import MISSING

PRINTED = "average as printed"
"""What tables show for a cell that was not run."""


@dataclass(frozen=True)
class Column:
    """One metric of the table. ``chance`` is that of an accuracy, which is shown in percent."""

    key: str
    title: str
    task: str
    metric: str
    chance: float | None = None

    @property
    def is_accuracy(self) -> bool:
        return self.chance is not None

    @property
    def unit(self) -> float:
        return 100.0 if self.is_accuracy else 1.0

    @property
    def lower_is_better(self) -> bool:
        return "perplexity" in self.metric or "bits" in self.metric

    @property
    def digits(self) -> int:
        if self is MEAN:
            return 2
        return 1 if self.is_accuracy else 3 if "bits" in self.metric else 2


COLUMNS = (
    Column("wikitext", "Wiki. ppl", "wikitext", "word_perplexity"),
    Column("lambada_ppl", "LMB. ppl", "lambada_openai", "perplexity"),
    Column("lambada", "LMB. acc", "lambada_openai", "acc", 0.0),
    Column("piqa", "PIQA", "piqa", "acc", 50.0),
    Column("hellaswag", "Hella.", "hellaswag", "acc_norm", 25.0),
    Column("winogrande", "Wino.", "winogrande", "acc", 50.0),
    Column("arc_easy", "ARC-e", "arc_easy", "acc", 25.0),
    Column("arc_challenge", "ARC-c", "arc_challenge", "acc_norm", 25.0),
    Column("boolq", "BoolQ", "boolq", "acc", 62.2),
    Column("openbookqa", "OBQA", "openbookqa", "acc_norm", 25.0),
    Column("sciq", "SciQ", "sciq", "acc", 25.0),
)
"""BoolQ's chance is its majority class. A few ARC questions have 3 or 5 choices; guessing gives 25."""

ACCURACIES = tuple(column for column in COLUMNS if column.is_accuracy)
MEAN = Column("mean", "mean of the 9", "mean", "acc", sum(c.chance or 0.0 for c in ACCURACIES) / len(ACCURACIES))

CARRIED = "wikitext_carried"
EXTRA_COLUMNS = (
    Column("wikitext_bits", "Wiki. bits/byte", "wikitext", "bits_per_byte"),
    Column("carried", "Wiki. ppl, carried", CARRIED, "word_perplexity"),
    Column("carried_bits", "Wiki. bits, carried", CARRIED, "bits_per_byte"),
    Column("lambada_bits", "LMB. bits/byte", "lambada_openai", "bits_per_byte"),
)
"""Not in the paper's table: bits per byte, and WikiText with the state carried over windows."""

_PAPER = {
    "340M": {
        "Mamba-2": (36.90, 105.69, 20.7, 61.9, 30.7, 50.2, 40.4, 22.1, 53.0, 27.0, 71.9),
        "DeltaNet": (38.09, 96.26, 22.5, 60.7, 30.1, 51.9, 41.7, 21.6, 60.1, 29.0, 70.4),
        "EFLA": (35.26, 79.97, 23.9, 61.0, 30.9, 51.1, 42.5, 23.8, 59.7, 30.8, 72.9),
        "Gated DeltaNet": (34.93, 72.46, 25.5, 62.7, 30.8, 49.3, 41.8, 21.7, 61.7, 27.4, 74.2),
        "Gated EFLA": (34.28, 69.37, 26.4, 61.8, 31.1, 52.1, 42.0, 22.8, 62.1, 29.4, 75.3),
    },
    "1.3B": {
        "DeltaNet": (18.38, 17.29, 41.8, 69.2, 44.5, 49.3, 52.5, 26.4, 58.1, 29.8, 82.6),
        "EFLA": (18.30, 16.54, 43.2, 68.9, 44.5, 52.1, 54.4, 26.4, 60.4, 31.6, 84.2),
    },
}
PRINTED_AVERAGES = {
    "340M": {"Mamba-2": 42.0, "DeltaNet": 42.2, "EFLA": 44.1, "Gated DeltaNet": 43.9, "Gated EFLA": 44.8},
    "1.3B": {"DeltaNet": 50.5, "EFLA": 51.8},
}
"""The averages the paper prints. DeltaNet's at 340M differs from the mean of its row, 43.11."""


def paper_rows(size: str) -> dict[str, dict[str, float]]:
    """The paper's numbers at "340M" (8B tokens) or "1.3B" (50B tokens): model -> column key -> number."""
    keys = [column.key for column in COLUMNS]
    return {model: dict(zip(keys, values, strict=True)) for model, values in _PAPER[size].items()}


def mean_accuracy(shown: Mapping[str, float | None]) -> float | None:
    """The mean of the nine accuracies, or ``None`` if one is missing."""
    values = [shown.get(column.key) for column in ACCURACIES]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(ACCURACIES) else None


@dataclass(frozen=True)
class TableCell:
    """A formatted number. ``is_best``: the best of the evaluated models on its line."""

    text: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class ResultTable:
    """One line per metric: title, chance, one cell per model; ``headings`` are the column titles."""

    headings: list[str]
    lines: list[list[TableCell]]
    notes: list[str] = field(default_factory=list)


def result_table(rows: Sequence[Record], paper: str = "340M") -> ResultTable:
    """Metrics as lines; columns of the models, then of the paper.

    The best of at least two different values is marked on each line. The mean of the nine accuracies is recomputed, for the
    paper too, if all nine are known; its standard error combines those of the tasks in quadrature.
    """
    cells = [row for row in rows if row.get("row") == "cell"]
    columns = [*COLUMNS, MEAN, *EXTRA_COLUMNS]
    known = {column.task for column in columns}
    other = [(str(row["task"]), metric) for row in cells if row["task"] not in known for metric in row["metrics"]]
    columns += [Column(f"{task} {metric}", f"{task} {metric}", task, metric) for task, metric in dict.fromkeys(other)]
    measured: dict[str, dict[str, tuple[float, float]]] = {str(row["model"]): {} for row in cells}
    for row in cells:
        measured[str(row["model"])] |= {c.key: shown_values(row, c) for c in columns if c.task == row["task"]}
    for values in measured.values():
        mean = mean_accuracy({key: value for key, (value, _) in values.items()})
        if mean is not None:
            squares = sum(values[column.key][1] ** 2 for column in ACCURACIES)
            values[MEAN.key] = mean, math.sqrt(squares) / len(ACCURACIES)
    published = _published(paper)
    lines = []
    for column in columns:
        if any(column.key in values for values in measured.values()):
            lines.append(_line(column, list(measured.values()), list(published.values())))
            if column is MEAN and published:
                printed = [TableCell(f"{row[PRINTED]:.1f}") for row in published.values()]
                lines.append([TableCell(PRINTED), *[TableCell()] * (1 + len(measured)), *printed])
    headings = ["", "chance", *measured, *(f"paper: {name}" for name in published)]
    return ResultTable(headings, lines, _notes(cells, published))


def shown_values(row: Mapping[str, Any], column: Column) -> tuple[float, float]:
    """A metric of a row and its standard error, in the unit of the column."""
    value = number(row["metrics"].get(column.metric))
    return value * column.unit, number(row["standard_errors"].get(column.metric)) * column.unit


def _line(
    column: Column, measured: Sequence[Mapping[str, tuple[float, float]]], published: Sequence[Mapping[str, float]]
) -> list[TableCell]:
    """One line of the table. measured: each model's values and standard errors by column; published: the paper's values."""
    shown = (values[column.key][0] for values in measured if column.key in values)
    finite = {value for value in shown if math.isfinite(value)}
    best = (min if column.lower_is_better else max)(finite) if len(finite) > 1 else None
    line = [TableCell(column.title), TableCell("" if column.chance is None else f"{column.chance:.1f}")]
    for values in measured:
        value, error = values.get(column.key, (math.nan, math.nan))
        text = _with_error(value, error, column.digits) if column.key in values else MISSING
        line.append(TableCell(text, value == best))
    return line + [TableCell(f"{row[column.key]:.{column.digits}f}" if column.key in row else "") for row in published]


def _published(paper: str) -> dict[str, dict[str, float]]:
    """The paper's numbers by column, with the mean of the accuracies recomputed and as printed."""
    sizes = {"none": (), "340M": ("340M",), "1.3B": ("1.3B",), "both": ("340M", "1.3B")}[paper]
    return {
        f"{model} {size}": {**row, MEAN.key: mean_accuracy(row) or math.nan, PRINTED: PRINTED_AVERAGES[size][model]}
        for size in sizes
        for model, row in paper_rows(size).items()
    }


def _notes(cells: Sequence[Record], published: Mapping[str, object]) -> list[str]:
    partial = sorted({str(row["task"]) for row in cells if row["num_items"] < row["num_items_in_set"]})
    is_all = len(partial) == len({row["task"] for row in cells})
    items = "the first items of a set" if is_all else "the items of a set"
    notes = [f"± is one standard error over {items}, not over seeds."]
    if partial and not is_all:
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
    """The table as GitHub Markdown."""
    lines = ["| " + " | ".join(table.headings) + " |", "| --- " + "| ---: " * (len(table.headings) - 1) + "|"]
    for line in table.lines:
        lines.append("| " + " | ".join(f"**{cell.text}**" if cell.is_best else cell.text for cell in line) + " |")
    return "\n".join([*lines, "", *table.notes])


def terminal(table: ResultTable) -> Any:
    """The table for a rich console, as narrow and short as it can be; the Markdown has all lines and notes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    notes = "\n".join(note for note in table.notes if len(note) <= 100)
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": 0, "show_edge": False, "caption_justify": "left"}
    shown = Table(title="zero-shot; columns with a size are the paper's models", caption=notes, **style)
    for index, heading in enumerate(table.headings):
        words = heading.removeprefix("paper: ").replace(" ", "\n") if heading.startswith("paper: ") else heading
        shown.add_column(Text(words), justify="left" if index == 0 else "right", no_wrap=True)
    for line in (line for line in table.lines if line[0].text != PRINTED):
        shown.add_row(*(Text(cell.text.replace(" ± ", "±"), style="bold" if cell.is_best else "") for cell in line))
    return shown


def _with_error(value: float, error: float, digits: int) -> str:
    if not math.isfinite(value):
        return "not finite"
    text = format_number(value, digits)
    if not math.isfinite(error):
        return text
    return f"{text} ± {error:,.{digits}f}" if abs(value) < 1e6 else f"{text} ± {error:.1g}"


def format_number(value: float, digits: int, sign: str = "") -> str:
    """A number with that many decimals, or three digits of a large one. sign: "+" shows it for positive numbers too."""
    return f"{value:{sign},.{digits}f}" if abs(value) < 1e6 else f"{value:{sign}.3g}"
