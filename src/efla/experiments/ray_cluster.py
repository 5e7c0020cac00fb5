"""Running cells on a Ray cluster (optional package ``ray``): the same cells, the same rows, more machines."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any

from efla.experiments.experiment import Cell, Event, Experiment, execute
from efla.experiments.processes import Emit
from efla.runs.records import Record, from_record, to_record


def run_on_ray(experiment: Experiment[Any], cells: Sequence[Cell], workers: int, threads: int, emit: Emit) -> None:
    """Run the cells as Ray tasks of ``threads`` processors each: on the cluster of ``RAY_ADDRESS``, else a local one."""
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise RuntimeError("--executor ray needs the package ray: pip install 'efla[ray]'") from None
    started_here = not ray.is_initialized()
    if started_here:
        local: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers * threads}
        ray.init(include_dashboard=False, log_to_driver=False, **local)
    try:
        task = ray.remote(num_cpus=threads, num_gpus=experiment.gpus_per_cell, max_retries=2)(_run_cell)
        waiting = list(cells)
        running: dict[Any, Cell] = {}
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.pop(0)
                reference = task.remote(experiment.name, to_record(experiment.config), cell.settings, threads)
                running[reference] = cell
                emit(Event("started", cell))
            for reference in ray.wait(list(running), num_returns=1)[0]:
                cell = running.pop(reference)
                try:
                    emit_rows = ray.get(reference)
                except ray.exceptions.RayError:
                    emit(Event("failed", cell, message=traceback.format_exc()))
                else:
                    emit(Event("finished", cell, rows=emit_rows))
    finally:
        if started_here:
            ray.shutdown()


def _run_cell(name: str, config: Record, settings: Record, threads: int) -> list[Record]:
    from efla.experiments import registry
    from efla.native import keep_freed_memory

    keep_freed_memory()
    cls = registry.get(name)
    experiment = cls(from_record(cls.config_class, config))

    def report(fraction: float, **values: float) -> None:
        return None

    return execute(experiment, Cell(settings), report, threads)
