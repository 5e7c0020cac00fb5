"""Lets flash-linear-attention's kernels run in Triton's interpreter, on CPU tensors.

Two of them lean on the compiler in ways the interpreter does not follow: autotuning would time kernels on a GPU, and
loop variables of the state kernels are asked for ``.to(dtype)``, which the interpreter's plain integers do not have.
"""

from __future__ import annotations

import builtins
import importlib.util
import os


def reason_to_skip() -> str | None:
    """Why the kernels cannot be interpreted in this process, or ``None``."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        return "needs flash-linear-attention and triton; `make test-gpu-sim` installs them beside the project"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1 in the environment, as `make test-gpu-sim` sets it"
    return None


class _Index(int):
    """A loop variable; the interpreter makes it a tensor when it is assigned."""

    def to(self, dtype):
        return int(self)


def _range(*limits):
    return map(_Index, builtins.range(*limits))


def install() -> None:
    """Make the kernels interpretable; call before the first one runs."""
    from fla.ops.common import chunk_delta_h, chunk_h
    from triton.runtime.autotuner import Autotuner

    # Every configuration "takes" the same time, so that the first one is taken.
    Autotuner._bench = lambda self, *args, config, **kwargs: [0.0, 0.0, 0.0]
    for module in (chunk_delta_h, chunk_h):
        module.range = _range
