"""Which of flash-linear-attention's operations runs a request, and with which arguments.

All are exact in values and gradients, because none divides by erase. (The gated delta rule of v (write / erase) has the
right values, but loses the gradient of a small erase in half precision.)
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla.scans import keys
from efla.scans.request import ScanRequest

# Up to this length the recurrent kernels beat the chunked ones, by flash-linear-attention's own choice in its layers.
SHORT = 64
# exp of it is zero in float32. A lower log_decay would only cost digits: the kernels sum it over 64 tokens in float32,
# and -inf - -inf is NaN.
CLOSED = -88.0


class Operation(NamedTuple):
    """One of flash-linear-attention's families, in its chunked or its recurrent form."""

    family: str  # "simple_gla", "delta_rule", "gated_delta_rule", "comba"
    recurrent: bool

    @property
    def name(self) -> str:
        return f"{'fused_recurrent' if self.recurrent else 'chunk'}_{self.family}"

    def load(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The function itself; imports flash-linear-attention."""
        function: Callable[..., tuple[Tensor, Tensor]]
        function = getattr(importlib.import_module(f"fla.ops.{self.family}"), self.name)
        return function


def has_ieee_products() -> bool:
    """Whether Triton was told to multiply float32 matrices in (nearly) full precision, not in TF32."""
    return os.environ.get("TRITON_F32_DEFAULT") in ("ieee", "tf32x3")


def choose_operation(request: ScanRequest, differentiable: bool) -> Operation:
    """The cheapest operation that is exact for this request."""
    recurrent = not differentiable and request.k.shape[1] <= SHORT * _sequences_per_row(request)
    if request.erase is None:
        return Operation("simple_gla", recurrent)
    if not is_one_tensor(*request.scalars[1:]):
        return Operation("comba", recurrent)
    if recurrent:
        return Operation("gated_delta_rule", True)
    if request.v.dtype == torch.float32:
        # chunk_delta_rule takes no float32, and chunk_gated_delta_rule solves in TF32 whatever Triton is told.
        return Operation("comba" if has_ieee_products() else "gated_delta_rule", False)
    is_grouped = request.v.shape[2] != request.k.shape[2]  # chunk_delta_rule gives NaN for grouped heads
    return Operation("delta_rule" if request.log_decay is None and not is_grouped else "gated_delta_rule", False)


def run(request: ScanRequest, differentiable: bool) -> tuple[Tensor, Tensor]:
    """(o, final_state) of the request, recorded by autograd if that is on: o in v's dtype, the state in float32."""
    if request.v.numel() == 0:
        return _run_nothing(request)
    operation = choose_operation(request, differentiable)
    o, final_state = operation.load()(
        **arguments(request, operation),
        scale=request.scale,
        initial_state=request.initial_state,
        output_final_state=True,
        cu_seqlens=request.cu_seqlens,
    )
    return o.to(request.v.dtype), final_state


def arguments(request: ScanRequest, operation: Operation) -> dict[str, Any]:
    """What the operation is called with: q, k, v and its own scalars.

    The chunked kernels multiply in v's dtype and want q, k, p and v alike. The recurrent ones convert each to float32 on
    loading, so that p and write v need no rounding.
    """
    q, k, v = request.q, request.k, request.v
    log_decay, erase, write = request.scalars
    log_decay = None if log_decay is None else log_decay.clamp(min=CLOSED)
    if not operation.recurrent:
        q, k = q.to(v.dtype), k.to(v.dtype)  # an L2 norm may have left them in float32
    scale_rows = _scale_in_float32 if operation.recurrent else _load_scale_rows()
    if operation.family != "gated_delta_rule":  # the only one that takes grouped heads
        q, k = (_repeat_heads(x, v.shape[2]) for x in (q, k))
    if operation.family in ("simple_gla", "comba"):
        v = scale_rows(v, write)
    if operation.family == "simple_gla":
        return {"q": q, "k": k, "v": v, "g": log_decay}
    if operation.family == "delta_rule":
        return {"q": q, "k": k, "v": v, "beta": write}
    if operation.family == "gated_delta_rule":
        if log_decay is None and not operation.recurrent:
            log_decay = torch.zeros_like(write)
        return {"q": q, "k": k, "v": v, "g": log_decay, "beta": write}
    # Comba erases p^T S from the state as it was before the decay.
    assert erase is not None
    erase = erase if log_decay is None else log_decay.exp() * erase
    decay = torch.zeros_like(write) if log_decay is None else log_decay
    return {"q": q, "k": k, "v": v, "p": scale_rows(k, erase), "g": decay, "beta": torch.ones_like(write)}


def prepare_keys(q: Tensor, k: Tensor, normalise: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, normalised if asked for, in their dtype, and k.k: one pass over each, where torch takes several.

    q, k: [B, T, Hk, K]; k.k: [B, T, Hk] in float64, of the keys before they are rounded.
    """
    if torch.compiler.is_compiling() or not k.numel():
        return keys.prepare_keys(q, k, normalise, dtype)
    from efla.scans.backends.fla import rows

    k, lam = rows.l2_normalize(k) if "k" in normalise else (k, rows.squared_norm(k))
    return (rows.l2_normalize(q)[0] if "q" in normalise else q), k, lam


def _load_scale_rows() -> Callable[[Tensor, Tensor], Tensor]:
    from efla.scans.backends.fla.rows import scale_rows

    return scale_rows


def _scale_in_float32(x: Tensor, factor: Tensor) -> Tensor:
    return factor[..., None] * x


def is_one_tensor(erase: Tensor | None, write: Tensor) -> bool:
    """Whether erase and write share their memory, without reading values."""
    return erase is not None and erase.data_ptr() == write.data_ptr() and erase.stride() == write.stride()


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[2] == num_heads else x.repeat_interleave(num_heads // x.shape[2], 2)


def _sequences_per_row(request: ScanRequest) -> int:
    return 1 if request.cu_seqlens is None else request.num_sequences


def _run_nothing(request: ScanRequest) -> tuple[Tensor, Tensor]:
    """Without tokens: no output, states unchanged."""
    o = request.v.clone(memory_format=torch.contiguous_format)
    if request.initial_state is None:
        return o, request.new_state(request.num_sequences).zero_()
    return o, request.initial_state.to(request.compute_dtype, copy=True)
