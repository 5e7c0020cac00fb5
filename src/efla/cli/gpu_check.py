"""``efla gpu-check``: whether the GPU kernels compile, fit and compute the right result, and how fast they are."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import track

from efla.errors import BackendUnavailable

Step = Literal["compile", "traffic", "conformance", "throughput"]


def gpu_check(
    targets: tuple[str, ...] = (),
    widths: tuple[int, ...] = (64, 128, 256),
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    packed: bool = False,
    all_configs: bool = False,
    jobs: int | None = None,
    steps: tuple[Step, ...] = ("compile", "traffic", "conformance", "throughput"),
    verbose: bool = False,
    output: Path | None = None,
) -> int:
    """Check the fla backend. Run this first on a GPU; it is useful without one too. Needs the extra 'gpu'.

    Compiles every kernel the backend would launch, for GPUs that need not be present, and shows shared memory, registers,
    spills and what does not fit; counts the bytes each rule moves. With a GPU it then compares every rule with the float64
    oracle and measures the throughput grid. The tables are Markdown: paste them into an issue.

    Exits with 1 if a kernel fits in no configuration, or a result is wrong.

    Args:
        targets: GPUs to compile for: sm_80 (A100), sm_90 (H100), sm_100 (B200), gfx942 (MI300X) (default: all).
        widths: Head widths, K = V.
        dtype: Dtype of the inputs when compiling.
        packed: Compile for packed sequences with initial states instead of plain batches.
        all_configs: Compile all configurations of the autotuner instead of stopping at the first that fits: takes hours.
        jobs: Number of compilers that run at a time (default: half of the processors).
        steps: What to do; conformance and throughput need a GPU and are skipped without one.
        verbose: Also list every compiled kernel.
        output: Also write everything to this JSON file. An existing file is not overwritten.
    """
    from efla.bench import machine_facts
    from efla.bench.gpu import conformance, report, throughput
    from efla.bench.gpu.compile import compile_kernels
    from efla.bench.gpu.target import TARGETS, get_target
    from efla.bench.gpu.traffic import count_traffic
    from efla.scans.backends import fla

    console = Console(soft_wrap=True)
    tracked = partial(track, console=console, transient=True, disable=not console.is_terminal)
    if fla.missing is not None:
        raise BackendUnavailable(f"the fla backend {fla.missing}")
    targets = targets or tuple(TARGETS)
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
        groups = tracked(compiling, "compiling kernels", total=len(targets) * len(widths))
        kernels = [k for *_, found in sorted(groups, key=lambda g: (targets.index(g[0]), g[1])) for k in found]
        record["kernels"] = [asdict(kernel) for kernel in kernels]
        is_right &= report.kernels(console, kernels, verbose)
    if "traffic" in steps:
        with console.status("counting bytes"):
            traffic = count_traffic(widths)
        record["traffic"] = [asdict(row) for row in traffic]
        report.traffic(console, traffic)
    device = conformance.find_device()
    if device is None:
        console.print("\nNo GPU here: conformance and throughput are skipped.")
    else:
        if "conformance" in steps:
            cases = conformance.cases(widths)
            checking = (conformance.run_case(*case, device=device) for case in cases)
            results = list(tracked(checking, "comparing with float64", total=len(cases)))
            record["conformance"] = [asdict(result) for result in results]
            is_right &= report.conformance(console, results)
        if "throughput" in steps and device == "cpu":
            console.print("\nNo throughput: the kernels run in Triton's interpreter.")
        elif "throughput" in steps and is_right:
            grid = list(throughput.run_grid(device, widths=widths))
            record["throughput"] = [asdict(row) for row in grid]
            report.throughput(console, grid)
        elif "throughput" in steps:
            console.print("\nNo throughput: the speed of a wrong kernel means nothing.")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"\nrows: {output}")
    console.print("\nnext: paste the tables into an issue" if device else "\nnext: run this on a machine with a GPU")
    return 0 if is_right else 1
