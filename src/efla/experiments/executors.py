"""Run cells in this process, in worker processes or on a Ray cluster. Each executor calls ``emit`` for every event."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

from efla.errors import import_optional
from efla.experiments import registry
from efla.experiments.experiment import Cell, Event, Experiment, Report, execute
from efla.native import keep_freed_memory
from efla.runs.records import Record, dumps, from_record, to_record

Emit = Callable[[Event], None]
_SECONDS_BETWEEN_REPORTS = 0.2


def run_inline(experiment: Experiment[Any], cells: Sequence[Cell], workers: int, threads: int, emit: Emit) -> None:
    """Run the cells one after another in this process. workers: must be 1."""
    assert workers == 1
    for cell in cells:
        emit(Event("started", cell))

        def report(fraction: float, **values: float) -> None:
            emit(Event("progress", cell, fraction, values))  # noqa: B023 (called within this iteration only)

        emit(_outcome(cell, lambda: execute(experiment, cell, report, threads)))  # noqa: B023


def _outcome(cell: Cell, run: Callable[[], list[Record]]) -> Event:
    """How a cell ended: finished with its rows, or failed with a traceback."""
    try:
        return Event("finished", cell, rows=run())
    except Exception:
        return Event("failed", cell, message=traceback.format_exc())


def task_of(experiment: Experiment[Any], cell: Cell, threads: int) -> Record:
    """A cell of an experiment as a JSON record for another process."""
    return {
        "experiment": experiment.name,
        "config": to_record(experiment.config),
        "cell": cell.settings,
        "threads": threads,
    }


def run_task(task: Record, report: Report) -> list[Record]:
    """Run the cell of a record made by :func:`task_of`; returns its rows."""
    cls = registry.get(task["experiment"])
    experiment = cls(from_record(cls.config_class, task["config"]))
    return execute(experiment, Cell(task["cell"]), report, task["threads"])


def run_in_processes(
    experiment: Experiment[Any], cells: Sequence[Cell], workers: int, threads: int, emit: Emit
) -> None:
    """Run the cells in worker processes. If a worker dies, only its cell fails."""
    waiting = deque(cells)
    messages: Messages = queue.Queue()
    running: dict[_Worker, Cell] = {}

    def assign(worker: _Worker, cell: Cell) -> None:
        running[worker] = cell
        emit(Event("started", cell))
        worker.send(task_of(experiment, cell, threads))

    try:
        for _ in range(min(workers, len(cells))):
            assign(_Worker(threads, messages), waiting.popleft())
        while running:
            worker, message = messages.get()
            if worker not in running:
                continue  # stopped
            event = message or {"kind": "failed", "message": worker.exit_message()}
            emit(Event(cell=running[worker], **event))
            if event["kind"] == "progress":
                continue
            if message is None or not waiting:
                worker.stop()
                del running[worker]
            if waiting:
                assign(worker if message else _Worker(threads, messages), waiting.popleft())
    finally:
        for worker in running:
            worker.stop()


class _Worker:
    """A worker process and the thread that reads its messages."""

    def __init__(self, threads: int, messages: Messages) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "efla.experiments.executors"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
            start_new_session=True,  # Ctrl-C reaches the parent only, which then stops its workers
        )
        self._listener = threading.Thread(target=self._listen, args=(messages,), daemon=True)
        self._listener.start()

    def send(self, task: Record) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the listener reports that the worker died
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

    def exit_message(self) -> str:
        """How the process ended, with the end of its standard error."""
        code = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-2000:].decode(errors="replace").strip()
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with code {code}"
        return f"the worker process {how}" + (f"; its last output:\n{tail}" if tail else "")

    def _listen(self, messages: Messages) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # the last line of a worker that died
            for line in self._process.stdout:
                messages.put((self, json.loads(line)))
        messages.put((self, None))


Messages = queue.Queue[tuple[_Worker, Record | None]]
"""From which worker, and what; ``None`` when it has died."""


def run_on_ray(experiment: Experiment[Any], cells: Sequence[Cell], workers: int, threads: int, emit: Emit) -> None:
    """Run the cells as Ray tasks of ``threads`` processors each, on the cluster of ``RAY_ADDRESS`` or else a local one."""
    ray = import_optional("ray", "--executor ray needs the package ray: pip install 'efla[ray]'")
    started_here = not ray.is_initialized()
    if started_here:
        local: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers * threads}
        ray.init(include_dashboard=False, log_to_driver=False, **local)
    try:
        remote = ray.remote(num_cpus=threads, num_gpus=experiment.gpus_per_cell, max_retries=2)(_run_ray_task)
        waiting = deque(cells)
        running: dict[Any, Cell] = {}
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.popleft()
                running[remote.remote(task_of(experiment, cell, threads))] = cell
                emit(Event("started", cell))
            for reference in ray.wait(list(running), num_returns=1)[0]:
                emit(_outcome(running.pop(reference), partial(ray.get, reference)))
    finally:
        if started_here:
            ray.shutdown()


def _run_ray_task(task: Record) -> list[Record]:
    keep_freed_memory()
    return run_task(task, lambda fraction, **values: None)


def _main() -> None:
    """A worker process: reads cells as JSON lines, writes progress and rows as JSON lines. It ends when its parent does."""
    keep_freed_memory()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps libraries' output out of the messages
    tasks: queue.Queue[Record] = queue.Queue()
    threading.Thread(target=_read_tasks, args=(sys.stdin, tasks), daemon=True).start()
    while True:
        _work(tasks.get(), out)


def _read_tasks(stream: IO[str], tasks: queue.Queue[Record]) -> None:
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

    event = _outcome(Cell(task["cell"]), lambda: run_task(task, report))
    _send(out, {"kind": event.kind, "rows": event.rows, "message": event.message})


def _send(out: IO[str], message: Record) -> None:
    try:
        out.write(dumps(message) + "\n")
        out.flush()
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    _main()
