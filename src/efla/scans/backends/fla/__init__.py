"""flash-linear-attention's Triton kernels: each call by the cheapest of its public operations that is exact.

    erase = 0                     chunk_simple_gla              v' = write v
    erase = write, no decay       chunk_delta_rule
    erase = write, decay          chunk_gated_delta_rule
    erase != write                chunk_comba                   p = exp(log_decay) erase k,  v' = write v,  beta = 1

Short sequences that are not differentiated use the recurrent form of the same operation, which computes in float32
throughout. :mod:`.operations` chooses and calls the operation; docs/howto/gpu.md says what has been verified. Neither triton nor
flash-linear-attention is imported before the first call.

Outside torch.compile, the operations' own autograd formulas compute the backward pass. Under torch.compile the scan is one
opaque operator that cannot keep their intermediate results, so the backward pass runs the forward kernels again.
"""

import importlib.metadata
import importlib.util
import os
from dataclasses import replace

import torch
from torch import Tensor

from efla.scans.backends.fla.operations import has_ieee_products, is_one_tensor, prepare_keys, run
from efla.scans.request import Backend, ScanGradients, ScanRequest, ScanResult

# Tested with 0.6.0. Later minor versions may change an operation's meaning; widen this after running `make test-gpu-sim`.
OLDEST, TOO_NEW = (0, 6), (0, 7)
MAX_KEY_WIDTH = 256  # the kernels that carry the state keep K in four blocks of 64

_INSTALL = "pip install 'efla[gpu]'"


def _missing() -> str | None:
    """What is not installed, found without importing anything."""
    if importlib.util.find_spec("fla") is None:
        return f"needs flash-linear-attention, which is not installed: {_INSTALL}"
    try:
        version = importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        return f"needs flash-linear-attention, but the installed package 'fla' is something else: {_INSTALL}"
    if importlib.util.find_spec("triton") is None:
        return f"needs triton, which is not installed: {_INSTALL}"
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


def forward(request: ScanRequest, save: bool, in_place: bool = False) -> ScanResult:
    o, final_state = run(request, differentiable=save)
    return ScanResult(o, final_state, final_state.new_empty(0))


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    """Run the operation again, recorded by autograd, and differentiate it.

    The calling operator has disabled autograd's dispatch keys; the guard enables them.
    """
    names = ("q", "k", "v", "log_decay", "erase", "write", "initial_state")
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        leaves: dict[str, Tensor | None] = {}
        for field in names:
            x = getattr(request, field)
            leaves[field] = None if x is None else x.detach().requires_grad_()
        _, erase, write = request.scalars
        if is_one_tensor(erase, write):
            leaves["erase"] = leaves["write"]
        o, final_state = run(replace(request, **leaves), differentiable=True)  # type: ignore[arg-type]
        outputs, cotangents = [o], [grad_o]
        if grad_final_state is not None and final_state.requires_grad:
            outputs.append(final_state)
            cotangents.append(grad_final_state)
        wanted = {field: x for field, x in leaves.items() if x is not None}
        found = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    grads: dict[str, Tensor | None] = dict.fromkeys(names)
    for (field, x), grad in zip(wanted.items(), found, strict=True):
        grads[field] = torch.zeros_like(x) if grad is None else grad
    if leaves["erase"] is leaves["write"] and grads["write"] is not None:
        grads["erase"] = torch.zeros_like(grads["write"])  # counted once, with write
    return ScanGradients(**grads)  # type: ignore[arg-type]


BACKEND = Backend(
    "fla", forward, backward, own_autograd=True, unavailable=unavailable, supports=supports, prepare_keys=prepare_keys
)
