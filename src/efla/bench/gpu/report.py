"""The tables of ``efla gpu-check``: what the kernels use and move, whether they are right, and how fast they are."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields

from rich.console import Console
from rich.markup import escape

from efla.bench.gpu.compile import CompiledKernel
from efla.bench.gpu.conformance import CaseResult
from efla.bench.gpu.target import TARGETS
from efla.bench.gpu.throughput import RuleThroughput
from efla.bench.gpu.traffic import BANDWIDTHS, Traffic

_DETAILS = [field.name for field in fields(CompiledKernel) if field.name not in ("launch", "dtype", "seconds")]


def kernels(console: Console, kernels: list[CompiledKernel], verbose: bool) -> bool:
    """Print what the kernels use and what does not fit; returns whether each fits in some configuration."""
    alternatives = defaultdict(list)
    groups = defaultdict(list)
    for kernel in kernels:
        alternatives[kernel.target, kernel.width, kernel.launch].append(kernel)
        groups[kernel.target, kernel.width].append(kernel)
    lost = [configs[0] for configs in alternatives.values() if all(config.problem for config in configs)]
    rows: list[list[object]] = []
    for (target, width), here in groups.items():
        fitting = [kernel for kernel in here if kernel.problem is None]
        worst = max(fitting, key=lambda kernel: kernel.spilled, default=None)
        shared = f"{max((kernel.shared for kernel in fitting), default=0):,} of {TARGETS[target].shared_bytes:,}"
        registers = max((kernel.registers for kernel in fitting), default=0)
        spilled = f"{worst.spilled:,} ({worst.kernel})" if worst is not None and worst.spilled else "0"
        all_fit = "no" if any(kernel in lost for kernel in here) else "yes"
        name = f"{target} ({TARGETS[target].example})"
        rows.append([name, width, len(here), shared, registers, spilled, len(here) - len(fitting), all_fit])
    columns = "target,width,compiled,most shared memory,most registers,most spilled bytes,do not fit,every kernel fits"
    print_table(console, "Kernels compiled ahead of time", columns.split(","), rows)
    problems = [kernel for kernel in kernels if kernel.problem is not None]
    if problems:
        console.print("\nConfigurations that do not fit; the autotuner skips them:\n")
        rows = [
            [k.target, k.width, k.kernel, f"{k.config} warps {k.warps} stages {k.stages}", k.problem] for k in problems
        ]
        print_table(console, None, ["target", "width", "kernel", "configuration", "why"], rows)
    for kernel in lost:
        where = f"on {kernel.target} at width {kernel.width}"
        console.print(f"[bold red]{kernel.kernel} of {kernel.operation} fits in no configuration {where}[/]")
    if verbose:
        console.print("\nEvery kernel:\n")
        print_table(console, None, _DETAILS, [[getattr(k, name) or "" for name in _DETAILS] for k in kernels])
    return not lost


def traffic(console: Console, traffic: list[Traffic]) -> None:
    """Print bytes and throughput bounds, relative to DeltaNet."""
    delta = {row.width: row.training for row in traffic if row.rule == "delta"}
    rows: list[list[object]] = [
        [
            row.rule,
            row.width,
            row.operation,
            f"{row.forward_kernels:.0f} + {row.forward_around:.0f}",
            f"{row.backward_kernels:.0f} + {row.backward_around:.0f}",
            f"{row.training / delta[row.width]:.2f}",
            *(f"{row.training_bound(gpu) / 1e6:.0f}" for gpu in BANDWIDTHS),
        ]
        for row in traffic
    ]
    bounds = [f"{gpu}, M tokens·heads/s at most" for gpu in BANDWIDTHS]
    title = "Bytes per token and head (kernels + torch operations around them), and the roofline in training"
    print_table(console, title, ["rule", "width", "operation", "forward", "backward", "of DeltaNet's", *bounds], rows)


def conformance(console: Console, results: list[CaseResult]) -> bool:
    """Print each rule's worst case per dtype and every failure; returns whether there is none."""
    groups = defaultdict(list)
    for result in results:
        groups[result.rule, result.dtype].append(result)
    rows: list[list[object]] = []
    for (rule, dtype), cases in groups.items():
        ran = [case for case in cases if case.skipped is None]
        worst = max(ran, key=lambda case: case.error / case.budget if case.budget else 0.0, default=None)
        described = worst and f"{worst.worst} {worst.error:.1e} of {worst.budget:.1e} ({worst.shape}, {worst.width})"
        wrong = sum(case.problem is not None for case in ran)
        rows.append([rule, dtype, len(ran), wrong, len(cases) - len(ran), described or ""])
    columns = ["rule", "dtype", "cases", "wrong", "left out", "worst error of its budget"]
    print_table(console, "Conformance with the float64 oracle", columns, rows)
    for reason in dict.fromkeys(result.skipped for result in results if result.skipped is not None):
        console.print(f"\nLeft out: the backend {reason}", markup=False)
    failures = [result for result in results if result.problem is not None]
    for case in failures:
        console.print(
            f"[bold red]WRONG[/] {case.rule}, {case.dtype}, {case.shape}, width {case.width}: {escape(str(case.problem))}"
        )
    return not failures


def throughput(console: Console, grid: list[RuleThroughput]) -> None:
    columns = ["work", "width", "length", "rule", "M tokens/s", "of DeltaNet's"]
    rows: list[list[object]] = [
        [row.work, row.width, row.length, row.rule, f"{row.million_tokens:.3g}", f"{row.against_delta:.2f}"]
        for row in grid
    ]
    print_table(console, "Throughput in bfloat16, and relative to DeltaNet", columns, rows)


def print_table(console: Console, title: str | None, columns: list[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table, aligned so that it reads well in a terminal too."""
    if title is not None:
        console.print(f"\n## {title}\n")
    text = [[str(cell) for cell in row] for row in rows]
    sizes = [max(map(len, column)) for column in zip(columns, *text, strict=True)]
    for row in (columns, ["-" * size for size in sizes], *text):
        cells = (cell.ljust(size) for cell, size in zip(row, sizes, strict=True))
        console.print(f"| {' | '.join(cells)} |", markup=False, highlight=False)
