"""Signals that stop a run: it finishes the current step, saves a checkpoint and exits.

This module uses only the standard library, because ``efla train`` installs its handlers before it imports torch, which
takes seconds.
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
"""Exit code after SIGTERM or SIGUSR1 (EX_TEMPFAIL): progress is saved, the same command resumes."""
INTERRUPTED = 130
"""Exit code after Ctrl-C; progress is saved too."""

_SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]


class Stopped(Exception):
    """A signal was received before the first step."""


class Interruption:
    """``with Interruption() as asked``: ``asked.signal`` is the signal received, or ``None``.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """

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
        """The name of the signal, which another rank may have received."""
        return "a signal" if self.signal is None else self.signal.name

    @property
    def exit_code(self) -> int:
        return _exit_code(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def guard_start() -> None:
    """In a process of ``efla train``, let a signal end it with its exit code until the run handles signals itself.

    Until then there is nothing to save. Other processes and programs that import efla keep their handlers.
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

    sys.argv is not enough: it lacks "efla" while ``-m`` imports the package, and worker processes get their parent's.
    """
    arguments = sys.argv[1:]
    program = sys.orig_argv[: len(sys.orig_argv) - len(arguments)][-1:]
    return arguments[:1] == [name] and sys.orig_argv[-len(arguments) :] == arguments and Path(*program).stem == "efla"
