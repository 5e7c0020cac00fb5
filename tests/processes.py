"""Other processes in tests: waited for by what they print, write or end with, never for seconds, and never left behind."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAST_RESORT = 1800
"""Seconds until a process counts as hanging: more than ten times what the slowest test takes beside busy loops."""


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process, its output and errors in one stream; killed at the end, or if it hangs."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    environment = {**os.environ, **options.pop("env", {})}
    process = subprocess.Popen(command, env=environment, text=True, **options)
    watchdog = threading.Timer(LAST_RESORT, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """Read what the process prints up to the line with ``text``."""
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if text in line:
            return line
    raise AssertionError(f"no line with {text!r}, exit code {process.wait()}:\n{''.join(printed)[-4000:]}")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Look again and again until it holds; fails if the process ends before."""
    deadline = time.monotonic() + LAST_RESORT
    while not condition():
        assert process is None or process.poll() is None, f"exit code {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """The processes that a process started, oldest first (Linux)."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
