"""``efla gpu-check``: whether the GPU kernels compile, fit and compute the right result, and how fast they are."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from efla.bench import machine_facts
from efla.bench.gpu import conformance, throughput
from efla.bench.gpu.compile import CompiledKernel, compile_kernels
from efla.bench.gpu.target import TARGETS, get_target
from efla.bench.gpu.traffic import BANDWIDTHS, Traffic, count_traffic
from efla.errors import BackendUnavailable
from efla.runs.progress import Bars
from efla.scans.backends.fla import missing

T = TypeVar("T")
Step = Literal["compile", "traffic", "conformance", "throughput"]
_DETAILS = [field.name for field in fields(CompiledKernel) if field.name not in ("launch", "dtype", "seconds")]


def gpu_check(
    targets: tuple[str, ...] = tuple(TARGETS),
    widths: tuple[int, ...] = (64, 128, 256),
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    packed: bool = False,
    all_configs: bool = False,
    jobs: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: half of the processors)")] = None,
    steps: tuple[Step, ...] = ("compile", "traffic", "conformance", "throughput"),
    verbose: bool = False,
    output: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(optional)")] = None,
) -> int:
    """Check the fla backend. Run this first on a GPU; it is useful without one too. Needs the extra 'gpu'.

    Compiles every kernel the backend would launch, for GPUs that need not be present, and shows shared memory, registers,
    spills and what does not fit; counts the bytes each rule moves. With a GPU it then compares every rule with the float64
    oracle and measures the throughput grid. The tables are Markdown: paste them into an issue.

    Exits with 1 if a kernel fits in no configuration, or a result is wrong.

    Args:
        targets: GPUs to compile for: sm_80 (A100), sm_90 (H100), sm_100 (B200), gfx942 (MI300X).
        widths: Head widths, K = V.
        dtype: Dtype of the inputs when compiling.
        packed: Compile for packed sequences with initial states instead of plain batches.
        all_configs: Compile all configurations of the autotuner instead of stopping at the first that fits: takes hours.
        jobs: Number of compilers that run at a time.
        steps: What to do; conformance and throughput need a GPU and are skipped without one.
        verbose: Also list every compiled kernel.
        output: Also write everything to this JSON file. An existing file is not overwritten.
    """
    console = Console(soft_wrap=True)
    if missing is not None:
        raise BackendUnavailable(f"the fla backend {missing}")
    for target in targets:
        get_target(target)
    if output is not None and output.exists():
        raise FileExistsError(f"{output} exists; name another file or remove it")
    facts = machine_facts()
    for key in ("efla", "torch", "triton", "flash-linear-attention", "devices"):
        console.print(f"{key}: {facts[key]}", highlight=False)
    record: dict[str, object] = {"facts": facts}
    is_right = True
    if "compile" in steps:
        compiling = compile_kernels(
            targets,
            widths,
            dtype,
            packed=packed,
            all_configs=all_configs,
            jobs=jobs or max(1, (os.cpu_count() or 1) // 2),
        )
        groups = _tracked(console, "compiling kernels", compiling, len(targets) * len(widths))
        kernels = [k for *_, found in sorted(groups, key=lambda g: (targets.index(g[0]), g[1])) for k in found]
        record["kernels"] = [asdict(kernel) for kernel in kernels]
        is_right &= report_kernels(console, kernels, verbose)
    if "traffic" in steps:
        with console.status("counting bytes"):
            traffic = count_traffic(widths)
        record["traffic"] = [asdict(row) for row in traffic]
        report_traffic(console, traffic)
    device = conformance.find_device()
    if device is None:
        console.print("\nNo GPU here: conformance and throughput are skipped.")
    else:
        if "conformance" in steps:
            cases = conformance.cases(widths)
            checking = (conformance.run_case(*case, device=device) for case in cases)
            results = _tracked(console, "comparing with float64", checking, len(cases))
            record["conformance"] = [asdict(result) for result in results]
            is_right &= report_conformance(console, results)
        if "throughput" in steps and device == "cpu":
            console.print("\nNo throughput: the kernels run in Triton's interpreter.")
        elif "throughput" in steps and is_right:
            grid = list(throughput.run_grid(device, widths=widths))
            record["throughput"] = [asdict(row) for row in grid]
            report_throughput(console, grid)
        elif "throughput" in steps:
            console.print("\nNo throughput: the speed of a wrong kernel means nothing.")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"\nrows: {output}")
    return 0 if is_right else 1


def report_kernels(console: Console, kernels: list[CompiledKernel], verbose: bool) -> bool:
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


def report_traffic(console: Console, traffic: list[Traffic]) -> None:
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


def report_conformance(console: Console, results: list[conformance.CaseResult]) -> bool:
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


def report_throughput(console: Console, grid: list[throughput.RuleThroughput]) -> None:
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


def _tracked(console: Console, description: str, items: Iterable[T], total: int) -> list[T]:
    """The items as a list, with a progress bar while they are computed."""
    found: list[T] = []
    with Bars(console) as bars:
        bars.update(description, 0, total)
        for item in items:
            found.append(item)
            bars.update(description, len(found), total, f"{len(found)}/{total}")
    return found
