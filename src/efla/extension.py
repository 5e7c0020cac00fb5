"""The compiled module ``efla._native``, if it was built, running on torch's own threads."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""The element types that the kernels take."""

module: Any = None
try:
    module = importlib.import_module("efla._native")
except ImportError as error:  # built without a compiler, or for another Python
    _import_error = str(error)


def missing() -> str | None:
    """Why the compiled module is not there, or ``None``."""
    if module is None:
        return f"was not built ({_import_error}): install a C++20 compiler and reinstall efla"
    return None


def _share_torch_threads() -> None:
    """Let the kernels run on the OpenMP runtime that torch has loaded: a pool of their own would fight with it."""
    folders = [Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs"]
    for pattern in ("libgomp*.so*", "libiomp5*", "libomp*"):
        for folder in folders:
            for path in sorted(folder.glob(pattern)):
                if module.set_parallel_runtime(str(path)):
                    return
    module.set_parallel_runtime("")


def materialize(x: Tensor) -> Tensor:
    """x in memory that says what x is: a view that negates its memory, or zeros that have none, become real numbers."""
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def bind_torch(*, use_c_table: bool = True) -> None:
    """Tell the module what a tensor is and how to ask torch; torch before 2.10 has no C table of its tensors."""
    module.bind_torch(
        Tensor,
        Tensor.is_neg,
        torch.is_grad_enabled,
        torch._C._len_torch_dispatch_stack,
        torch.get_num_threads,
        torch._C._increment_version,
        vars(forward_ad),
        use_c_table,
    )


if module is not None:
    _share_torch_threads()
    bind_torch()
