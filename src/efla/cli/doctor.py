"""``efla doctor``: what runs on this machine, and whether it computes the right thing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import efla
from efla.bench.gpu import conformance
from efla.errors import BackendUnavailable
from efla.scans.backends import native
from efla.testing import assert_matches_oracle, make_inputs

_PACKAGES = ("efla", "torch", "transformers", "numpy", "safetensors", "triton", "flash-linear-attention")


@dataclass(frozen=True)
class BackendReport:
    """How a backend did: ``reason`` why it cannot run here, ``problem`` what its self-check found."""

    name: str
    reason: str | None
    problem: str | None
    seconds: float


def doctor() -> int:
    """Show versions, threads, SIMD level and backends, and check each backend against the float64 oracle.

    Exits with 1 if a backend that runs here gives a wrong result.
    """
    console = Console()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for key, value in machine_facts().items():
        facts.add_row(f"[bold]{key}[/]", value)
    console.print(facts)
    console.print()

    reports = [check_backend(name) for name in efla.backends()]
    table = Table("backend", "here", "self-check against the float64 oracle", title="Backends", title_justify="left")
    for report in reports:
        if report.reason is not None:
            table.add_row(report.name, "[yellow]no[/]", escape(report.reason))
        elif report.problem is not None:
            table.add_row(report.name, "[green]yes[/]", f"[bold red]WRONG[/] {escape(report.problem)}")
        else:
            table.add_row(report.name, "[green]yes[/]", f"[green]right[/] in {report.seconds:.2f} s")
    console.print(table)
    return 1 if any(report.problem for report in reports) else 0


def machine_facts() -> dict[str, str]:
    """Versions, processor, threads and devices, as printable text."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        **{name: _version(name) for name in _PACKAGES},
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} processors",
        "SIMD (torch)": torch.backends.cpu.get_cpu_capability(),
        "SIMD (native)": native.simd_level(),
        "devices": ", ".join(devices),
    }


def check_backend(name: str) -> BackendReport:
    """A self-check of about two seconds: awkward lengths, packing, hard numbers, outputs and gradients."""
    reason = efla.backends()[name]
    if reason is not None:
        return BackendReport(name, reason, None, 0.0)
    start = time.perf_counter()
    problem = None
    try:
        if name == "fla":  # on the GPU, in half precision, and within what that allows
            conformance.self_check()
        else:
            _check_on_cpu(name)
    except (AssertionError, BackendUnavailable) as error:
        problem = str(error)
    except Exception as error:
        # A kernel that does not even run is what this check is for.
        problem = f"{type(error).__name__}: {error}"
    return BackendReport(name, None, problem, time.perf_counter() - start)


def _check_on_cpu(name: str) -> None:
    for rule in ("efla", "gated_efla", "delta"):
        assert_matches_oracle(make_inputs(rule, batch=1, length=65, initial_state=True), name)
    assert_matches_oracle(make_inputs("gated_efla", packed=[1, 30, 17]), name)
    assert_matches_oracle(make_inputs("efla", kind="mixed_norms", batch=1, length=40), name)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
