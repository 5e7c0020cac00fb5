"""What a long evaluation shows: a bar for the task at hand on a terminal, one line per finished task anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text


class Progress(Protocol):
    """Told of work as it is done."""

    def begin(self, total: int) -> None: ...

    def advance(self, count: int) -> None: ...


class Display:
    """A bar while a piece of work runs, and a line when it is finished."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0
        self._bars: Bars | None = None
        self._bar = TaskID(0)

    @contextmanager
    def work(self, name: str) -> Iterator[Display]:
        """The piece of work that ``begin`` and ``advance`` are about."""
        with Bars(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), MofNCompleteColumn(),
            TimeRemainingColumn(), console=self._console, transient=True, disable=not self._console.is_terminal,
        ) as bars:  # fmt: skip
            self._bars, self._bar = bars, bars.add_task(name, total=None)
            try:
                yield self
            finally:
                self._bars = None

    def begin(self, total: int) -> None:
        if self._bars is not None:
            self._bars.reset(self._bar, total=total)

    def advance(self, count: int) -> None:
        if self._bars is not None:
            self._bars.advance(self._bar, count)

    def finished(self, name: str, values: str, seconds: float | None) -> None:
        """One line; ``seconds`` is ``None`` for what an earlier run had finished."""
        self._done += 1
        when = "from an earlier run" if seconds is None else clock(seconds)
        self._console.print(Text(f"{self._done}/{self._total}  {name}  {values}  {when}"), soft_wrap=True)


def clock(seconds: float) -> str:
    """A duration as a reader would write it."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}min {rest:02d}s" if minutes else f"{seconds:.1f}s"


class Stopwatch:
    """Seconds since it was made, and when that was."""

    def __init__(self) -> None:
        import datetime

        self.started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start
