"""Signals that ask a run to stop: the step in progress is finished, a checkpoint is saved, then it ends.

The standard library alone: ``efla train`` listens before it imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

PREEMPTED = 75
"""Exit code after SIGTERM or SIGUSR1: what was done is saved, the same command continues it (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: saved too."""

_SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]


class Stopped(Exception):
    """A signal came before the first step."""


class Interruption:
    """``with Interruption() as asked``: ``asked.signal`` is the signal that came, or ``None``. A second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        """The signal's name; another rank may have got it."""
        return "a signal" if self.signal is None else self.signal.name

    @property
    def exit_code(self) -> int:
        return _exit_code(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def guard_start() -> None:
    """In a process of ``efla train``: a signal ends it with its exit code, until the run listens for itself.

    Until then there is nothing to save and nothing to undo. Other processes, and programs that import efla, keep their handlers.
    """
    if _is_command("train"):
        for number in _SIGNALS:
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    os.write(2, f"efla train: stopped by {name} outside training; the same command starts it again\n".encode())
    os._exit(_exit_code(number))


def _exit_code(number: int | None) -> int:
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def _is_command(name: str) -> bool:
    """Whether this process is ``efla NAME`` or ``python -m efla NAME``.

    sys.argv alone does not tell: it has no "efla" while ``-m`` imports the package, and a worker process is given its parent's.
    """
    arguments = sys.argv[1:]
    program = sys.orig_argv[: len(sys.orig_argv) - len(arguments)][-1:]
    return arguments[:1] == [name] and sys.orig_argv[-len(arguments) :] == arguments and Path(*program).stem == "efla"
