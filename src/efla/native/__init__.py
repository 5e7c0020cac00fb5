"""The compiled CPU kernels, if they were built, on torch's own threads, and the allocator settings that suit them.

Three things are called native: this package; its extension module ``efla.native._kernels``, compiled from csrc/; and the
backend of that name in :mod:`efla.scans.backends`, which runs scans on it.
"""

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""The element types that the kernels take."""

kernels: Any = None
"""The extension module, or ``None``."""
try:
    kernels = importlib.import_module("efla.native._kernels")
except ImportError as error:  # built without a compiler, or for another Python
    _import_error = str(error)


def missing() -> str | None:
    """Why the kernels are missing, or ``None``."""
    if kernels is None:
        return f"was not built ({_import_error}): install a C++20 compiler and reinstall efla"
    return None


def _share_torch_threads() -> None:
    """Run the kernels on the OpenMP runtime that torch has loaded. A second thread pool would compete with it."""
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"]
    for pattern in ("libgomp*.so*", "libiomp5*", "libomp*"):
        for folder in folders:
            for path in sorted(folder.glob(pattern)):
                if kernels.set_parallel_runtime(str(path)):
                    return
    kernels.set_parallel_runtime("")


def materialize(x: Tensor) -> Tensor:
    """x as plain memory: clones views that negate their memory, and zeros that have none."""
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def bind_torch(*, use_c_table: bool = True) -> None:
    """Give the extension torch's tensor type and callables. torch before 2.10 has no C table of its tensors."""
    kernels.bind_torch(
        Tensor,
        Tensor.is_neg,
        torch.is_grad_enabled,
        torch._C._len_torch_dispatch_stack,
        torch.get_num_threads,
        torch._C._increment_version,
        vars(forward_ad),
        use_c_table,
    )


# Numbers of glibc's mallopt parameters.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MIB = 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to 2 GiB of freed memory for the next allocation. Returns false without glibc.

    By default glibc returns large freed blocks to the system and requests them again, and the system fills every page with
    zeros each time: a training step on tensors of tens of megabytes can lose a third of its time. The setting is for the
    whole process, so only our own commands and workers call this, never an import.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * _MIB))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


if kernels is not None:
    _share_torch_threads()
    bind_torch()
