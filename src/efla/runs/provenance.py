"""Where a row comes from: versions, git commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import torch

import efla
from efla.runs.records import Record
from efla.scans.backends import choose_backend


@cache
def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {
        "efla": efla.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


@cache
def git_commit() -> str | None:
    """The commit of the source tree, with ``+changes`` if it was edited since (``+unknown``: git did not say); ``None``
    outside a repository, or inside one that is not ours."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+unknown" if changed is None else "+changes" if changed else "")


def backend_used(name: str, device: str = "cpu", width: int = 64) -> str:
    """The backend that runs the scans of a float32 model: the one named, or what "auto" chooses on that device."""
    k = torch.empty(1, 1, 1, width, device=device)
    return choose_backend(name, k, k, torch.float32).name


@cache
def machine() -> Record:
    """Processor, its cores and the operating system."""
    return {"processor": processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "--no-optional-locks", *arguments],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
