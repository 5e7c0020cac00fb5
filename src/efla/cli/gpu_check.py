"""``efla gpu-check``: do the GPU kernels compile, fit, compute the right thing, and how fast are they?"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from efla.bench.gpu import conformance, roofline, throughput
from efla.bench.gpu.compile_kernels import CompiledKernel
from efla.bench.gpu.processes import compile_kernels, count_traffic
from efla.bench.gpu.targets import TARGETS, get_target
from efla.bench.gpu.traffic import Traffic
from efla.cli.doctor import machine_facts
from efla.errors import BackendUnavailable
from efla.scans.backends.fla.requirements import missing


def gpu_check(
    targets: tuple[str, ...] = tuple(TARGETS),
    widths: tuple[int, ...] = (64, 128, 256),
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    packed: bool = False,
    all_configs: bool = False,
    jobs: int = max(1, (os.cpu_count() or 1) // 2),
    steps: tuple[Literal["compile", "traffic", "conformance", "throughput"], ...] = (
        "compile",
        "traffic",
        "conformance",
        "throughput",
    ),
    details: bool = False,
    output: Path | None = None,
) -> int:
    """Check the fla backend: what a GPU user runs first, and useful without a GPU too. Needs the extra 'gpu'.

    Compiles every kernel the backend would launch for GPUs that need not be there, and shows shared memory, registers, spills
    and what does not fit; counts the bytes each rule moves. On a machine with a GPU it then holds every rule to the float64
    oracle and measures the throughput grid. The tables are Markdown: paste them into an issue.

    Exits with 1 if a kernel fits in no configuration, or a result is wrong.

    Args:
        targets: What to compile for: sm_80 (A100), sm_90 (H100), sm_100 (B200), gfx942 (MI300X).
        widths: Head widths, K = V.
        dtype: The inputs' dtype when compiling.
        packed: Compile for packed sequences with initial states, not for plain batches.
        all_configs: Compile all configurations of the autotuner, not only until one fits: hours instead of minutes.
        jobs: How many compilers run at a time.
        steps: What to do; conformance and throughput need a GPU and are left out without one.
        details: Also list every compiled kernel.
        output: Write everything to this JSON file too. An existing file is not overwritten.
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
        kernels = _compile(console, targets, widths, dtype, packed, all_configs, jobs)
        record["kernels"] = [asdict(kernel) for kernel in kernels]
        is_right &= report_kernels(console, kernels, details)
    if "traffic" in steps:
        with console.status("counting bytes"):
            traffic = count_traffic(widths)
        record["traffic"] = [asdict(row) for row in traffic]
        report_traffic(console, traffic)
    device = conformance.find_device()
    if device is None:
        console.print("\nNo GPU here: conformance and throughput are left out.")
    else:
        if "conformance" in steps:
            results = _check_conformance(console, device, widths)
            record["conformance"] = [asdict(result) for result in results]
            is_right &= report_conformance(console, results)
        if "throughput" in steps and device == "cpu":
            console.print("\nNo throughput: the kernels run in Triton's interpreter.")
        elif "throughput" in steps and is_right:
            grid = list(throughput.run_grid(device, widths=widths))
            record["throughput"] = [asdict(row) for row in grid]
            report_throughput(console, grid)
        elif "throughput" in steps:
            console.print("\nNo throughput: a number from a wrong kernel would mean nothing.")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"\nwritten to {output}")
    return 0 if is_right else 1


def _compile(
    console: Console,
    targets: tuple[str, ...],
    widths: tuple[int, ...],
    dtype: str,
    packed: bool,
    all_configs: bool,
    jobs: int,
) -> list[CompiledKernel]:
    kernels: list[CompiledKernel] = []
    with _progress(console) as progress:
        task = progress.add_task("compiling kernels", total=len(targets) * len(widths))
        for _, _, found in compile_kernels(targets, widths, dtype, packed=packed, all_configs=all_configs, jobs=jobs):
            kernels += found
            progress.advance(task)
    order = {target: place for place, target in enumerate(targets)}
    return sorted(kernels, key=lambda kernel: (order[kernel.target], kernel.width))


def report_kernels(console: Console, kernels: list[CompiledKernel], details: bool) -> bool:
    """Print what the kernels use and what does not fit; whether each fits in some configuration."""
    alternatives = defaultdict(list)
    for kernel in kernels:
        alternatives[kernel.target, kernel.width, kernel.launch].append(kernel)
    lost = [configs[0] for configs in alternatives.values() if all(config.problem for config in configs)]
    rows = []
    for target, width in dict.fromkeys((kernel.target, kernel.width) for kernel in kernels):
        here = [kernel for kernel in kernels if (kernel.target, kernel.width) == (target, width)]
        fitting = [kernel for kernel in here if kernel.problem is None]
        rows.append(
            [
                f"{target} ({TARGETS[target].example})",
                width,
                len(here),
                f"{max((kernel.shared for kernel in fitting), default=0):,} of {TARGETS[target].shared_bytes:,}",
                max((kernel.registers for kernel in fitting), default=0),
                _most_spilled(fitting),
                len(here) - len(fitting),
                "no" if any((kernel.target, kernel.width) == (target, width) for kernel in lost) else "yes",
            ]
        )
    console.print("\n## Kernels compiled ahead of time\n")
    print_table(
        console,
        "target,width,compiled,most shared memory,most registers,most spilled bytes,do not fit,every kernel fits",
        rows,
    )
    problems = [kernel for kernel in kernels if kernel.problem is not None]
    if problems:
        console.print("\nConfigurations that do not fit; the autotuner passes over them:\n")
        fields: list[list[object]] = [
            [k.target, k.width, k.kernel, f"{k.config} warps {k.warps} stages {k.stages}", k.problem] for k in problems
        ]
        print_table(console, "target,width,kernel,configuration,why", fields)
    for kernel in lost:
        console.print(
            f"[bold red]{kernel.kernel} of {kernel.operation} fits in no configuration "
            f"on {kernel.target} at width {kernel.width}[/]"
        )
    if details:
        console.print("\nEvery kernel:\n")
        names = "target,width,operation,kernel,config,warps,stages,shared,registers,spilled,problem"
        print_table(console, names, [[getattr(k, name) or "" for name in names.split(",")] for k in kernels])
    return not lost


def _most_spilled(kernels: list[CompiledKernel]) -> str:
    worst = max(kernels, key=lambda kernel: kernel.spilled, default=None)
    return "0" if worst is None or worst.spilled == 0 else f"{worst.spilled:,} ({worst.kernel})"


def report_traffic(console: Console, traffic: list[Traffic]) -> None:
    """Bytes and the roofline, each next to DeltaNet's."""
    delta = {row.width: row for row in traffic if row.rule == "delta"}
    rows = []
    for row in traffic:
        peers = delta[row.width]
        bounds = [f"{roofline.tokens_per_second(row.training, gpu) / 1e6:.0f}" for gpu in roofline.GPUS]
        rows.append(
            [
                row.rule,
                row.width,
                row.operation,
                f"{row.forward_kernels:.0f} + {row.forward_around:.0f}",
                f"{row.backward_kernels:.0f} + {row.backward_around:.0f}",
                f"{row.training / peers.training:.2f}",
                *bounds,
            ]
        )
    console.print(
        "\n## Bytes per token and head (kernels + torch operations around them), and the roofline in training\n"
    )
    names = [f"{gpu.name}, M tokens·heads/s at most" for gpu in roofline.GPUS]
    print_table(console, ",".join(["rule", "width", "operation", "forward", "backward", "of DeltaNet's"]), rows, names)


def _check_conformance(console: Console, device: str, widths: tuple[int, ...]) -> list[conformance.CaseResult]:
    results = []
    with _progress(console) as progress:
        task = progress.add_task("comparing with float64", total=conformance.num_cases(widths))
        for result in conformance.run_cases(device, widths):
            results.append(result)
            progress.advance(task)
    return results


def report_conformance(console: Console, results: list[conformance.CaseResult]) -> bool:
    """Print each rule's worst case per dtype, and what failed; whether nothing did."""
    grouped = defaultdict(list)
    for result in results:
        grouped[result.rule, result.dtype].append(result)
    rows = []
    for (rule, dtype), cases in grouped.items():
        ran = [case for case in cases if case.skipped is None]
        worst = max(ran, key=lambda case: case.error / case.budget if case.budget else 0.0, default=None)
        described = (
            ""
            if worst is None
            else f"{worst.worst} {worst.error:.1e} of {worst.budget:.1e} ({worst.shape}, {worst.width})"
        )
        rows.append(
            [rule, dtype, len(ran), sum(case.problem is not None for case in ran), len(cases) - len(ran), described]
        )
    console.print("\n## Conformance with the float64 oracle\n")
    print_table(console, "rule,dtype,cases,wrong,left out,worst error of its budget", rows)
    for reason in dict.fromkeys(result.skipped for result in results if result.skipped is not None):
        console.print(f"\nLeft out: the backend {reason}", markup=False)
    wrong = [result for result in results if result.problem is not None]
    for case in wrong:
        console.print(
            f"[bold red]WRONG[/] {case.rule}, {case.dtype}, {case.shape}, width {case.width}: {escape(str(case.problem))}"
        )
    return not wrong


def report_throughput(console: Console, grid: list[throughput.Throughput]) -> None:
    console.print("\n## Throughput in bfloat16, and relative to DeltaNet\n")
    rows = [
        [row.work, row.width, row.length, row.rule, f"{row.million_tokens:.3g}", f"{row.against_delta:.2f}"]
        for row in grid
    ]
    print_table(console, "work,width,length,rule,M tokens/s,of DeltaNet's", rows)


def print_table(console: Console, names: str, rows: list[list[object]], more_names: list[str] | None = None) -> None:
    """A Markdown table, which reads well in a terminal too."""
    header = [*names.split(","), *(more_names or [])]
    text = [[str(cell) for cell in row] for row in rows]
    sizes = [max(map(len, column)) for column in zip(header, *text, strict=True)]
    for row in (header, ["-" * size for size in sizes], *text):
        cells = (cell.ljust(size) for cell, size in zip(row, sizes, strict=True))
        console.print(f"| {' | '.join(cells)} |", markup=False, highlight=False)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
