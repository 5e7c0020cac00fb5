"""What a person sees while a model trains: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class Display:
    """``with Display(console, steps, done) as display``; a silent one for ranks that are not the main one."""

    def __init__(self, console: Console | None, steps: int, done: int, device: torch.device) -> None:
        self.console, self.steps, self.device = console, steps, device
        self._last_line = time.monotonic()
        self._progress: Progress | None = None
        self._task: int | None = None
        if console is not None and console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("", total=steps, completed=done)

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, step: int, loss: float, rate: float, tokens_per_second: float) -> None:
        """A step was done."""
        if self.console is None:
            return
        text = f"loss {loss:.3f}  rate {rate:.1e}  {tokens_per_second:,.0f} tokens/s  {memory_gb(self.device):.2f} GB"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=text)  # type: ignore[arg-type]
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.line(f"step {step:,}/{self.steps:,}  {text}")

    def line(self, text: str) -> None:
        """Something to keep on the screen."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def memory_gb(device: torch.device) -> float:
    """Largest memory so far, of the device or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # not on this system
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
