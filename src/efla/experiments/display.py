"""The progress display: one line per running cell with its loss and accuracy, and the time left for the grid."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from efla.experiments.experiment import Event


class Display:
    """Shows events. On a terminal, live bars; elsewhere one line per finished cell."""

    def __init__(
        self,
        total: int,
        already: int,
        workers: int,
        console: Console,
        expected: Mapping[str, float] | None = None,
    ) -> None:
        """expected: seconds that each cell to come was estimated to take, by id; without it all count alike."""
        self._expected = dict(expected or {})
        self._total, self._done, self._workers, self._console = total, already, max(1, workers), console
        self._begun: dict[str, float] = {}
        self._fractions: dict[str, float] = {}
        self._durations: list[tuple[float, float]] = []  # seconds, and what they were expected to be
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
            TextColumn("{task.fields[values]}", markup=False),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._all = self._progress.add_task("all cells", total=max(1, total), completed=already, values="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        name = event.cell.id
        if event.kind == "started":
            self._begun[name], self._fractions[name] = time.monotonic(), 0.0
            self._tasks[name] = self._progress.add_task(name, total=1.0, values="")
        elif event.kind == "progress":
            self._fractions[name] = event.fraction
            self._progress.update(self._tasks[name], completed=event.fraction, values=_values(event.values or {}))
        else:
            seconds = time.monotonic() - self._begun.pop(name)
            self._fractions.pop(name)
            weight = self._expected.pop(name, 1.0)
            self._progress.remove_task(self._tasks.pop(name))
            self._done += 1
            if event.kind == "finished":
                self._durations.append((seconds, weight))
            self._line(event, seconds)
        overall = self._done + sum(self._fractions.values())
        self._progress.update(self._all, completed=overall, values=self._overall())

    def _line(self, event: Event, seconds: float) -> None:
        if event.kind == "finished":
            values = _values((event.rows or [{}])[-1].get("show", {}))
            text = f"{self._done}/{self._total}  {event.cell.id}  {values}  {clock(seconds)}{self._left_text()}"
        else:
            text = f"{self._done}/{self._total}  {event.cell.id}  FAILED: {event.message.strip().splitlines()[-1]}"
        self._console.print(Text(text), soft_wrap=True)

    def _overall(self) -> str:
        return f"{self._done}/{self._total} cells{self._left_text()}"

    def _left_text(self) -> str:
        left = self.seconds_left()
        return "" if left is None or self._done >= self._total else f"  about {clock(left)} left"

    def seconds_left(self) -> float | None:
        """Time left if the cells to come take as long, in proportion to what was expected, as those seen so far; ``None``
        before anything is known."""
        now = time.monotonic()
        running = {name: part * self._expected.get(name, 1.0) for name, part in self._fractions.items()}
        seen = [(now - self._begun[name], done) for name, done in running.items() if self._fractions[name] > 0.02]
        seen += self._durations
        if not seen:
            return None
        cells = self._total - self._done
        work = (sum(self._expected.values()) if self._expected else cells) - sum(running.values())
        pace = sum(seconds / done for seconds, done in seen) / len(seen)
        return max(0.0, work) * pace / min(self._workers, max(1, cells))


def _values(values: dict[str, float]) -> str:
    return "  ".join(f"{key} {float(value):.4g}" for key, value in values.items())


def clock(seconds: float) -> str:
    """A duration as a reader would say it: 2h 05min, 3min 07s, 4.2s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}min" if hours else f"{minutes}min {rest:02d}s" if minutes else f"{seconds:.1f}s"
