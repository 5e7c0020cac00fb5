"""Progress of an evaluation: a bar for the running cell on a terminal, and one line per finished cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class EvaluationDisplay:
    """A bar that counts the work of the running cell, and a numbered line for each finished one of ``total``."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0
        self._bars: Progress | None = None
        self._bar = TaskID(0)

    @contextmanager
    def work(self, name: str) -> Iterator[EvaluationDisplay]:
        """Show a bar, which ``begin`` and ``advance`` change, while a cell runs."""
        with Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), MofNCompleteColumn(),
            TimeRemainingColumn(), console=self._console, transient=True, disable=not self._console.is_terminal,
        ) as bars:  # fmt: skip
            self._bars, self._bar = bars, bars.add_task(name, total=None)
            try:
                yield self
            finally:
                self._bars = None

    def begin(self, total: int) -> None:
        """Count from 0 to ``total``."""
        if self._bars is not None:
            self._bars.reset(self._bar, total=total)

    def advance(self, count: int) -> None:
        if self._bars is not None:
            self._bars.advance(self._bar, count)

    def finish(self, name: str, text: str, seconds: float) -> None:
        """A cell finished after so many seconds; ``text`` says with what result."""
        self._line(f"{name}  {text}  {clock(seconds)}")

    def skip(self, name: str, text: str) -> None:
        """A cell was finished by an earlier run."""
        self._line(f"{name}  {text}  from an earlier run")

    def _line(self, text: str) -> None:
        self._done += 1
        self._console.print(Text(f"{self._done}/{self._total}  {text}"), soft_wrap=True)


def clock(seconds: float) -> str:
    """A duration: 3min 07s, 4.2s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}min {rest:02d}s" if minutes else f"{seconds:.1f}s"
