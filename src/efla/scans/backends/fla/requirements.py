"""What the backend needs: flash-linear-attention of a tested version, a GPU, and inputs its kernels compute exactly."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch
from torch import Tensor

# Tested with 0.6.0. Later minor versions may change an operation's meaning; widen this after running `make test-gpu-sim`.
OLDEST, TOO_NEW = (0, 6), (0, 7)
MAX_KEY_WIDTH = 256  # the kernels that carry the state keep K in four blocks of 64

_INSTALL = "pip install 'efla[gpu]'"


def _missing() -> str | None:
    """What is not installed, found without importing anything."""
    if importlib.util.find_spec("fla") is None:
        return f"needs flash-linear-attention, which is not installed: {_INSTALL}"
    if importlib.util.find_spec("triton") is None:
        return f"needs triton, which is not installed: {_INSTALL}"
    try:
        version = importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        return f"needs flash-linear-attention, but the installed package 'fla' is something else: {_INSTALL}"
    return version_problem(version)


def version_problem(version: str) -> str | None:
    """Why this version of flash-linear-attention is not used, or ``None``."""
    digits = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if OLDEST <= digits < TOO_NEW:
        return None
    oldest, too_new = (".".join(map(str, bound)) for bound in (OLDEST, TOO_NEW))
    return (
        f"is tested with flash-linear-attention >= {oldest}, < {too_new}, and {version} is installed: "
        f"pip install 'flash-linear-attention>={oldest},<{too_new}'"
    )


# Looked up once, at import: choosing a backend must stay cheap and traceable by torch.compile.
missing = _missing()


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_ieee_products() -> bool:
    """Whether Triton was told to multiply float32 matrices in (nearly) full precision, not in TF32."""
    return os.environ.get("TRITON_F32_DEFAULT") in ("ieee", "tf32x3")


def unavailable() -> str | None:
    if missing is not None:
        return missing
    if interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "needs a CUDA, ROCm or XPU device, and torch sees none"


def supports(k: Tensor, v: Tensor, dtype: torch.dtype) -> str | None:
    device = k.device.type
    if interpreted():
        if device != "cpu":
            return f"runs in Triton's interpreter here (TRITON_INTERPRET=1), on CPU tensors only (k is on {k.device})"
        if k.dtype == torch.bfloat16:
            return "runs in Triton's interpreter here, whose bfloat16 arithmetic is wrong; use float32 or float16"
    elif device not in ("cuda", "xpu"):
        return f"runs on CUDA, ROCm and XPU devices (k is on {k.device})"
    if dtype == torch.float64:
        return "computes in float32, and this call is in float64"
    if k.shape[3] > MAX_KEY_WIDTH:
        return f"takes key widths up to {MAX_KEY_WIDTH} (K = {k.shape[3]})"
    if v.dtype == torch.float32 and not (interpreted() or has_ieee_products() or _accepts_tf32()):
        return (
            "would multiply float32 matrices in TF32: pass bfloat16, or accept TF32 by "
            "torch.set_float32_matmul_precision('high'), or start Python with TRITON_F32_DEFAULT=ieee"
        )
    return None


def _accepts_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
