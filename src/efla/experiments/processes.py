"""Running cells in this process or in worker processes; each calls ``emit`` with what happens."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

from efla.experiments.experiment import Cell, Event, Experiment, Report, execute
from efla.runs.records import Record, dumps, to_record

Emit = Callable[[Event], None]


def run_inline(experiment: Experiment[Any], cells: Sequence[Cell], threads: int, emit: Emit) -> None:
    """Run the cells one after another in this process."""
    for cell in cells:
        emit(Event("started", cell))
        try:
            rows = execute(experiment, cell, _reporter(cell, emit), threads)
        except Exception:
            emit(Event("failed", cell, message=traceback.format_exc()))
        else:
            emit(Event("finished", cell, rows=rows))


def _reporter(cell: Cell, emit: Emit) -> Report:
    def report(fraction: float, **values: float) -> None:
        emit(Event("progress", cell, fraction, values))

    return report


def run_in_processes(
    experiment: Experiment[Any], cells: Sequence[Cell], workers: int, threads: int, emit: Emit
) -> None:
    """Run the cells in worker processes of their own; a worker that dies fails its cell only."""
    waiting = deque(cells)
    messages: queue.Queue[tuple[_Worker, Record | None]] = queue.Queue()
    running: dict[_Worker, Cell] = {}
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(waiting))):
            pool.append(_Worker(threads, messages))
            _assign(pool[-1], experiment, waiting.popleft(), running, emit)
        while running:
            worker, message = messages.get()
            cell = running.pop(worker, None)
            if cell is None:
                continue
            if message is not None and message["kind"] == "progress":
                running[worker] = cell
                emit(Event("progress", cell, message["fraction"], message["values"]))
                continue
            if message is None:  # the worker died
                text = worker.obituary()
                worker.stop()
                pool.remove(worker)
                emit(Event("failed", cell, message=text))
                if waiting:
                    worker = _Worker(threads, messages)
                    pool.append(worker)
            elif message["kind"] == "finished":
                emit(Event("finished", cell, rows=message["rows"]))
            else:
                emit(Event("failed", cell, message=message["message"]))
            if waiting:
                _assign(worker, experiment, waiting.popleft(), running, emit)
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """One worker process and the thread that listens to it."""

    def __init__(self, threads: int, messages: queue.Queue[tuple[_Worker, Record | None]]) -> None:
        self.threads = threads
        one = str(threads)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "efla.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": one, "MKL_NUM_THREADS": one},
            start_new_session=True,  # Ctrl-C reaches the parent, which then ends its workers
        )
        self._listener = threading.Thread(target=self._listen, args=(messages,), daemon=True)
        self._listener.start()

    def send(self, task: Record) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the listener reports the death
            self._process.stdin.write(dumps(task) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def obituary(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-2000:].decode(errors="replace").strip()
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with code {code}"
        return f"the worker process {how}" + (f"; its last words:\n{tail}" if tail else "")

    def _listen(self, messages: queue.Queue[tuple[_Worker, Record | None]]) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # a line cut off by the worker's death
            for line in self._process.stdout:
                messages.put((self, json.loads(line)))
        messages.put((self, None))


def _assign(worker: _Worker, experiment: Experiment[Any], cell: Cell, running: dict[_Worker, Cell], emit: Emit) -> None:
    running[worker] = cell
    emit(Event("started", cell))
    worker.send(
        {
            "experiment": experiment.name,
            "config": to_record(experiment.config),
            "cell": cell.settings,
            "threads": worker.threads,
        }
    )
