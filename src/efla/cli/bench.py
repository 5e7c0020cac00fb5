"""``efla bench``: speed as ratios to other implementations in the same process."""

from __future__ import annotations

import datetime
import importlib
import json as json_format
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from efla.errors import check_names
from efla.runs.rows import write_atomically

if TYPE_CHECKING:
    from efla.runs.timing import Measurement

MOST_LINES = 18
"""Pieces of work in the summary; with the lines around it, it fits a terminal of 25 lines."""
# The benchmarks of an experiment's model are in its folder.
_MODULES = {name: f"efla.experiments.{name}.bench" for name in ("smnist", "mad")}


def bench(
    what: Annotated[Literal["scan", "models", "train", "smnist", "mad", "evaluation"], tyro.conf.Positional] = "scan",
    /,
    suite: tuple[str, ...] = (),
    threads: int | None = None,
    rounds: int = 7,
    verbose: bool = False,
    json: bool = False,
    output: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Compare the speed of efla, transformers, softmax attention and the machine's sgemm in one process.

    Prints no number if a backend is wrong. Run nothing else meanwhile.

    Args:
        what: The scan alone, whole models, training (a step, the loop, preparing text), a training step of the
            sequential MNIST classifier or of the MAD model, or the scoring of multiple-choice questions (needs EFLA_DATA).
        suite: Which parts to run (default: all). Scan: headline, rules, lengths, decode, overhead, short, growth. Models:
            throughput, contexts, decode, weights, prefill, step, qwen, qwen-bfloat16, qwen-wide, qwen-wide-bfloat16, rewind,
            loading. Train: step, surroundings, preparing. Smnist: training. Mad: step, scan. Evaluation: hellaswag.
        threads: CPU threads of every contender (default: torch's number).
        rounds: How often each contender is timed; medians and quartiles are reported.
        verbose: Print a table per piece of work, with quartiles and rates, instead of a line.
        json: Print rows as JSON instead.
        output: Also write the rows to this JSON file.
        plot: Also plot cost against length to this SVG (with a dark twin), PNG or PDF file (needs the suite "lengths").
    """
    import torch

    from efla import bench as benchmarks
    from efla.bench.section import save_lengths

    suites = importlib.import_module(_MODULES.get(what, f"efla.bench.{what}")).SUITES
    check_names("suite", suite, suites)
    if plot is not None and (what != "scan" or (suite and "lengths" not in suite)):
        raise ValueError(f"--plot draws the suite lengths of efla bench scan, got {what} {' '.join(suite)}")
    if threads is not None:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    console = Console(stderr=json)
    with console.status("checking every contender against the float64 oracle"):
        benchmarks.check_contenders()
    machine = benchmarks.processor_name()
    console.print(f"[green]correctness check passed[/]; {machine}, {threads} threads, float32 unless noted")
    groups: list[list[Measurement]] = []
    with redirect_stdout(sys.stderr if json else sys.stdout):  # what a suite prints is not JSON
        for name in suite or suites:
            for group in suites[name](rounds):
                groups.append(group)
                if verbose and not json:
                    console.print(comparison_table(group))
    if not json and not verbose:
        for group in groups[:MOST_LINES]:
            console.print(summary_line(group, console.width), markup=False, highlight=False)
        if len(groups) > MOST_LINES:
            console.print(f"and {len(groups) - MOST_LINES} more with --verbose or --suite NAME")
    measurements = [m for group in groups for m in group]
    record = {
        "machine": machine,
        "facts": benchmarks.machine_facts(),
        "threads": threads,
        "rounds": rounds,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": [m.as_row() for m in measurements],
    }
    text = json_format.dumps(record, indent=1)
    if json:
        print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        before = f" (replacing those of {_date(output)})" if output.exists() else ""
        write_atomically(output, f"{text}\n".encode())
        console.print(f"rows: {output}{before}", markup=False, soft_wrap=True)
    if plot is not None:
        save_lengths(measurements, plot, f"{machine}, {threads} threads")
    if not json:
        console.print("next: --verbose shows quartiles and rates, --output FILE keeps the rows", markup=False)
    return 0


def summary_line(group: list[Measurement], width: int) -> str:
    """A piece of work on one line: the first contender's median, and the others' as multiples of it."""
    first, *others = group
    peers_first = sorted(others, key=lambda m: not m.contender.startswith("transformers"))
    ratios = (f"{m.contender} {m.median / first.median:.1f}x" for m in peers_first if m.contender != "sgemm")
    line = f"{_cut(first.work, 33):<33}  {_cut(first.contender, 16)} {_time(first.median)}, {', '.join(ratios)}"
    return _cut(line.removesuffix(", "), width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def comparison_table(group: list[Measurement]) -> Table:
    """Time, spread and ratio to the first contender of one piece of work; rates where they were measured."""
    sgemm = next((m.gflops for m in group if m.contender == "sgemm"), None)
    lines = []
    for m in group:
        gflops = None if m.contender == "softmax attention" else m.gflops
        share = None if gflops is None or sgemm is None or m.contender == "sgemm" else gflops / sgemm
        lines.append(
            {
                "contender": m.contender,
                "median": _time(m.median),
                "quartiles": f"{_time(m.low)} - {_time(m.high)}",
                "ratio": "" if m.contender == "sgemm" else f"{m.median / group[0].median:.2f}x",
                "GFLOP/s": "" if gflops is None else f"{gflops:.1f}",
                "of sgemm": "" if share is None else f"{share:.2f}",
                "per second": "" if m.per_second is None else f"{m.per_second:,.0f}",
                "in scans": "" if m.scan_share is None else f"{m.scan_share:.0%}",
            }
        )
    shown = [name for name in lines[0] if any(line[name] for line in lines)]
    table = Table(*shown, title=group[0].work)
    for line in lines:
        table.add_row(*(line[name] for name in shown))
    return table


def _date(file: Path) -> str:
    """When a file of rows was written: its own date, or the file's time."""
    try:
        return str(json_format.loads(file.read_text())["date"])
    except (ValueError, KeyError, TypeError):
        return datetime.datetime.fromtimestamp(file.stat().st_mtime).isoformat(timespec="seconds")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
