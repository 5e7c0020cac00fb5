"""Where a row comes from: versions, git commit, machine, and the memory its work took."""

import contextlib
import ctypes
import gc
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy
import torch

import efla
from efla.runs.records import Record
from efla.scans.backends import choose_backend


def stamp() -> Record:
    """What every row of results says of its origin."""
    return {"versions": versions(), "commit": git_commit(), "machine": machine()}


@cache
def versions() -> dict[str, str]:
    """Versions of the software that results depend on."""
    return {
        "efla": efla.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


@cache
def git_commit() -> str | None:
    """The commit of the source tree, with ``+changes`` if files were edited since (``+unknown`` if git fails).

    ``None`` outside a repository, or inside another project's.
    """
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+unknown" if changed is None else "+changes" if changed else "")


def backend_used(name: str, device: str = "cpu", width: int = 64) -> str:
    """The backend that runs the scans of a float32 model: the one named, or the one "auto" chooses on that device."""
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
    """The processor's own name for itself."""
    return _proc("cpuinfo", "model name") or platform.processor() or platform.machine()


def _proc(file: str, key: str) -> str | None:
    """The first value of a key in a file of Linux's /proc."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


class PeakMemory:
    """How much memory a piece of work needs at its peak: ``memory = PeakMemory("cpu"); work(); memory.growth()``.

    On a CPU (Linux only) it returns free memory to the system, resets the kernel's high-water mark, and measures that
    mark minus the resident memory at the start. The resolution is a page; memory that libraries reserve is included.
    On a GPU it asks the allocator.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._device = device
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            self._before = _resident_after_reset()

    def growth(self) -> int | None:
        """Bytes, or ``None`` if the system does not report them."""
        if self._before is None:
            return None
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device) - self._before
        peak = _read("VmHWM")
        return None if peak is None else max(0, peak - self._before)


def _resident_after_reset() -> int | None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc only
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    except OSError:
        return None
    return _read("VmRSS")


def _read(key: str) -> int | None:
    """A size of the process in bytes."""
    found = _proc("self/status", f"{key}:")
    return None if found is None else int(found.split()[0]) * 1024


def max_memory_gb(device: torch.device) -> float:
    """Peak memory so far, of the device or of this process; 0 where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # not on this system
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
