"""A worker process: reads cells as JSON lines, writes progress and rows as JSON lines. It ends when its parent does.

:mod:`efla.experiments.executors` starts it as ``python -m efla.experiments.worker``.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import IO

from efla.experiments.executors import run_task
from efla.native import keep_freed_memory
from efla.runs.records import Record, dumps

_SECONDS_BETWEEN_REPORTS = 0.2


def main() -> None:
    keep_freed_memory()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps libraries' output out of the messages
    tasks: queue.Queue[Record] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, tasks), daemon=True).start()
    while True:
        _work(tasks.get(), out)


def _listen(stream: IO[str], tasks: queue.Queue[Record]) -> None:
    for line in stream:
        tasks.put(json.loads(line))
    os._exit(0)  # the parent closed the pipe or died, possibly in the middle of a cell; its rows are not needed


def _work(task: Record, out: IO[str]) -> None:
    last = 0.0

    def report(fraction: float, **values: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_REPORTS:
            last = now
            _send(out, {"kind": "progress", "fraction": fraction, "values": values})

    try:
        rows = run_task(task, report)
    except Exception:
        _send(out, {"kind": "failed", "message": traceback.format_exc()})
    else:
        _send(out, {"kind": "finished", "rows": rows})


def _send(out: IO[str], message: Record) -> None:
    try:
        out.write(dumps(message) + "\n")
        out.flush()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
