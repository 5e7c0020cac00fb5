"""The parts of a report section, and helpers that the experiments share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from efla.runs.chart import Figure
from efla.runs.records import Record
from efla.runs.statistics import MISSING, Claim


@dataclass(frozen=True)
class Table:
    """A table; the first column is its row's name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One experiment's part of the report. The first figure and the first table are shown, the others are folded."""

    key: str
    title: str
    source: str
    question: str
    """What the experiment asks, in a sentence."""
    intro: str
    """How it asks it."""
    claims: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    settings: Sequence[tuple[str, str]] = ()
    data: Sequence[str] = ()
    budget: str = ""
    not_concluded: Sequence[str] = ()


def settings_table(cells: Sequence[Record]) -> list[tuple[str, str]]:
    """The config of the rows, their versions, threads and commits."""
    config = cells[0]["config"]
    lines = [(key.replace("_", " "), _show(value)) for key, value in config.items()]
    for key in ("versions", "threads", "commit", "machine"):
        values = sorted({_show(row.get(key)) for row in cells})
        lines.append((key, "; ".join(values)))
    return lines


def budget(cells: Sequence[Record]) -> str:
    """The cost of the rows: cells, hours and dates."""
    seconds = sum(float(row["wall_seconds"]) for row in cells)
    unit, size = next((u, s) for u, s in (("h", 3600), ("min", 60), ("s", 1)) if seconds >= s or s == 1)
    days = sorted({str(row["started"])[:10] for row in cells})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    each = "/".join(map(str, sorted({int(row["threads"]) for row in cells})))
    return f"{len(cells)} cells, {seconds / size:.1f} {unit} of wall-clock time in total at {each} thread(s) each, {when} (UTC)."


def applicable(*notes: tuple[object, str]) -> list[str]:
    """The texts of those notes, (condition, text), whose condition is true."""
    return [text for condition, text in notes if condition]


def _show(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name  # where a folder lies on one machine says nothing on another
    return MISSING if value is None else str(value)
