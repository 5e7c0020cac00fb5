"""``efla bench``: how fast the scan is, as ratios against its peers in the same process."""

from __future__ import annotations

import datetime
import importlib
import json as json_format
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from efla.cli.doctor import machine_facts
from efla.errors import unknown_name
from efla.runs import provenance
from efla.runs.rows import write_atomically
from efla.runs.timing import Measurement

# Experiments own the benchmarks of their models.
_MODULES = {name: f"efla.experiments.{name}.bench" for name in ("smnist", "mad")}


def bench(
    what: Annotated[Literal["scan", "models", "train", "smnist", "mad", "evaluation"], tyro.conf.Positional] = "scan",
    /,
    suite: tuple[str, ...] = (),
    threads: int | None = None,
    rounds: int = 7,
    json: bool = False,
    output: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Time efla against transformers, softmax attention and the machine's own sgemm, all in turn in one process.

    Refuses to print a number if a backend is wrong. Nothing else should run meanwhile.

    Args:
        what: The scan alone, whole models, training (a step, the loop, preparing text), a training step of the
            sequential MNIST classifier or of the MAD model, or the scoring of multiple-choice questions (needs EFLA_DATA).
        suite: Which parts to run, all by default. Scan: headline, rules, lengths, decode. Models: throughput, contexts.
            Train: step, surroundings, preparing. Smnist: training. Mad: step, scan. Evaluation: hellaswag.
        threads: Threads for every contender; default is torch's own number.
        rounds: How often each contender is timed; medians and quartiles are reported.
        json: Print rows as JSON instead of tables.
        output: Also write the rows to this JSON file.
        plot: Also draw cost against length to this SVG or PNG file (needs the suite "lengths").
    """
    from efla.bench.gate import check_contenders
    from efla.bench.plot import plot_lengths

    suites = importlib.import_module(_MODULES.get(what, f"efla.bench.{what}")).SUITES
    for name in suite:
        if name not in suites:
            raise unknown_name("suite", name, suites)
    if plot is not None and (what != "scan" or (suite and "lengths" not in suite)):
        raise ValueError(f"--plot draws the suite lengths of efla bench scan, got {what} {' '.join(suite)}")
    if threads is not None:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    console = Console(stderr=json)
    with console.status("checking every contender against the float64 oracle"):
        check_contenders()
    console.print(f"[green]correctness gate passed[/]; {processor_name()}, {threads} threads, float32 unless said")
    measurements: list[Measurement] = []
    with redirect_stdout(sys.stderr if json else sys.stdout):  # a suite's remarks are not JSON
        for name in suite or suites:
            for group in suites[name](threads, rounds):
                measurements += group
                if not json:
                    console.print(comparison_table(group))
    record = {
        "machine": processor_name(),
        "facts": machine_facts(),
        "threads": threads,
        "rounds": rounds,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": [m.as_row() for m in measurements],
    }
    if json:
        print(_dumps(record))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        before = f" (in place of those of {_date(output)})" if output.exists() else ""
        write_atomically(output, (_dumps(record) + "\n").encode())
        console.print(f"rows     {output}{before}", markup=False, soft_wrap=True)
    if plot is not None:
        plot_lengths(measurements, plot, f"{processor_name()}, {threads} threads")
    return 0


def comparison_table(group: list[Measurement]) -> Table:
    """One piece of work: each contender's time, spread and useful GFLOP/s, and how many times faster the first one is."""
    table = Table("contender", "median", "quartiles", "ratio", title=group[0].work)
    rates, scans = any(m.items for m in group), any(m.scan_share for m in group)
    flops = any(m.gflops for m in group)
    for wanted, names in ((flops, ("GFLOP/s", "of sgemm")), (rates, ("per second",)), (scans, ("in scans",))):
        for name in names if wanted else ():
            table.add_column(name)
    sgemm = next((m.gflops for m in group if m.contender == "sgemm"), None)
    for m in group:
        gflops = None if m.contender == "softmax attention" else m.gflops
        of_sgemm = None if gflops is None or sgemm is None or m.contender == "sgemm" else gflops / sgemm
        table.add_row(
            m.contender,
            _time(m.median),
            f"{_time(m.low)} - {_time(m.high)}",
            "" if m.contender == "sgemm" else f"{m.median / group[0].median:.2f}x",
            *([_number(gflops, ".1f"), _number(of_sgemm, ".2f")] if flops else []),
            *([_number(m.per_second, ",.0f")] if rates else []),
            *([_number(m.scan_share, ".0%")] if scans else []),
        )
    return table


def processor_name() -> str:
    """What the processor calls itself, with its instruction set."""
    return f"{provenance.processor()} ({torch.backends.cpu.get_cpu_capability()})"


def _date(file: Path) -> str:
    """When a file of rows was written, as it says or as the disk does."""
    try:
        return str(json_format.loads(file.read_text())["date"])
    except (ValueError, KeyError, TypeError):
        return datetime.datetime.fromtimestamp(file.stat().st_mtime).isoformat(timespec="seconds")


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _dumps(record: object) -> str:
    return json_format.dumps(record, indent=1)
