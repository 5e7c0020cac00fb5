"""By how much a piece of work makes memory grow at its peak: the process's on a CPU (Linux), the allocator's on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Made before the work, asked after it: ``memory = PeakMemory("cpu"); work(); memory.growth()``.

    On a CPU free memory is given back to the system first, the kernel's high-water mark is reset, and the growth is that
    mark minus what was resident: it has the resolution of pages and includes what a library sets aside.
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
        """Bytes; ``None`` where the system does not tell."""
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
        _CLEAR.write_text("5")  # resets VmHWM to VmRSS
    except OSError:
        return None
    return _read("VmRSS")


def _read(key: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
