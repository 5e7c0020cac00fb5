"""Progress of long jobs: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

_SECONDS_BETWEEN_LINES = 10.0


class Bars:
    """Progress bars, one per name: ``with Bars(console) as bars``. Without a console nothing is shown."""

    def __init__(self, console: Console | None) -> None:
        self.console = console or Console(quiet=True)
        self.is_live = console is not None and console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        self._last_line = time.monotonic()
        self._progress = RichProgress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}", markup=False), TimeElapsedColumn(),
            console=self.console, transient=True, disable=not self.is_live,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, name: str, completed: float, total: float | None, text: str = "") -> None:
        """Show how far a bar is; the first update adds it."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, text=text)
        self._progress.update(self._tasks[name], completed=completed, total=total, text=text)

    def remove(self, name: str) -> None:
        self._progress.remove_task(self._tasks.pop(name))

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self.console.print(Text(text), soft_wrap=True)

    def line_now_and_then(self, text: str) -> None:
        """Where there are no live bars, print a line if the last one is ten seconds old."""
        if not self.is_live and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.line(text)


class GridProgress(Bars):
    """Progress over a grid of cells: a bar per running cell, a line per finished one, and the time left.

    already: cells finished earlier. expected: estimated seconds of each cell to come, by id; default all alike.
    """

    def __init__(
        self,
        console: Console | None,
        total: int,
        *,
        already: int = 0,
        workers: int = 1,
        expected: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(console)
        self._total, self._done, self._workers = total, already, max(1, workers)
        self._expected = dict(expected or {})
        self._started: dict[str, float] = {}
        self._fractions: dict[str, float] = {}
        self._durations: list[tuple[float, float]] = []  # seconds, and the expected seconds
        self._update_all()

    def start(self, cell: str) -> Counter:
        """A cell starts. The counter is for work that is counted; others call :meth:`progress`."""
        self._started[cell] = time.monotonic()
        self.progress(cell, 0.0)
        return Counter(self, cell)

    def progress(self, cell: str, fraction: float, values: Mapping[str, float] | None = None, count: str = "") -> None:
        """A running cell got this far, with these values or this count."""
        self._fractions[cell] = fraction
        self.update(cell, fraction, 1.0, count or format_values(values or {}))
        self._update_all()

    def finish(self, cell: str, text: str) -> None:
        """A cell finished; ``text`` says with what result."""
        seconds, expected = self._end(cell)
        self._durations.append((seconds, expected))
        self._line(f"{cell}  {text}  {clock(seconds)}{self._left_text()}")

    def fail(self, cell: str, message: str) -> None:
        """A cell failed; the last line of ``message`` is shown."""
        self._end(cell)
        self._line(f"{cell}  FAILED: {message.strip().splitlines()[-1]}")

    def skip(self, cell: str, text: str) -> None:
        """A cell was finished by an earlier run."""
        self._done += 1
        self._line(f"{cell}  {text}  from an earlier run")

    def seconds_left(self) -> float | None:
        """Time left at the pace so far, relative to the expected seconds; ``None`` before anything is known."""
        now = time.monotonic()
        running = {cell: part * self._expected.get(cell, 1.0) for cell, part in self._fractions.items()}
        seen = [(now - self._started[cell], done) for cell, done in running.items() if self._fractions[cell] > 0.02]
        seen += self._durations
        if not seen:
            return None
        cells = self._total - self._done
        work = (sum(self._expected.values()) if self._expected else cells) - sum(running.values())
        pace = sum(seconds / done for seconds, done in seen) / len(seen)
        return max(0.0, work) * pace / min(self._workers, max(1, cells))

    def _end(self, cell: str) -> tuple[float, float]:
        """Remove a running cell; returns its seconds and expected seconds."""
        seconds = time.monotonic() - self._started.pop(cell)
        self._fractions.pop(cell)
        self.remove(cell)
        self._done += 1
        return seconds, self._expected.pop(cell, 1.0)

    def _line(self, text: str) -> None:
        self.line(f"{self._done}/{self._total}  {text}")
        self._update_all()

    def _update_all(self) -> None:
        overall = self._done + sum(self._fractions.values())
        self.update("all cells", overall, max(1, self._total), f"{self._done}/{self._total} cells{self._left_text()}")

    def _left_text(self) -> str:
        left = self.seconds_left()
        return "" if left is None or self._done >= self._total else f"  about {clock(left)} left"


class Counter:
    """Progress of a running cell as a count, of requests for example."""

    def __init__(self, grid: GridProgress, cell: str) -> None:
        self._grid, self._cell, self._total, self._count = grid, cell, 1, 0

    def begin(self, total: int) -> None:
        """Count from 0 to ``total``."""
        self._total, self._count = max(1, total), 0
        self.advance(0)

    def advance(self, count: int) -> None:
        self._count += count
        self._grid.progress(self._cell, self._count / self._total, count=f"{self._count}/{self._total}")


def format_values(values: Mapping[str, float]) -> str:
    """Names and numbers on one line."""
    return "  ".join(f"{key} {float(value):.4g}" for key, value in values.items())


def clock(seconds: float) -> str:
    """A duration: 2h 05min, 3min 07s, 4.2s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}min" if hours else f"{minutes}min {rest:02d}s" if minutes else f"{seconds:.1f}s"
