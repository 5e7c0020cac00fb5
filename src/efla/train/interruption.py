"""Signals that ask a run to stop: the step in progress is finished, a checkpoint is saved, then it ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

PREEMPTED = 75
"""Exit code after SIGTERM or SIGUSR1: saved, and to be continued by the same command (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: saved too."""


class Interruption:
    """``with Interruption() as asked``: ``asked.signal`` is the signal that came, or ``None``. A second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)):
                if number not in self._before:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.signal == signal.SIGINT else PREEMPTED

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
