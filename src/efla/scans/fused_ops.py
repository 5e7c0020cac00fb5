"""Linear attention as one torch operator, for a backend that works out the rule's scalars inside its kernels.

The same shape as :mod:`efla.scans.torch_ops`, one level up: inputs are beta and log_gate, not the three scalars.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from efla.scans import validation
from efla.scans.backends import native
from efla.scans.operators import fake_result, needs_gradient, present, register_gradients
from efla.scans.types import FusedRequest, ScanResult

_FIELDS = (
    *("q", "k", "v", "beta", "log_gate", "initial_state"),
    *("cu_seqlens", "scale", "rule", "qk_l2norm"),
)


@torch.library.custom_op("efla::fused_attention", mutates_args=())
def fused_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_gate: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    rule: str,
    qk_l2norm: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final_state, saved) of linear attention by ``rule``; ``saved`` is empty unless ``save``."""
    request = _request(q, k, v, beta, log_gate, initial_state, cu_seqlens, scale, rule, qk_l2norm)
    result, status = native.fused_forward(request, save)
    check_status(status, request)
    return result.o, result.final_state, result.saved


@fused_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    *fields, save = arguments
    request = _request(*fields)
    return fake_result(request, save, lambda: native.saved_size(request.k, request.v))


@torch.library.custom_op("efla::fused_attention_backward", mutates_args=())
def fused_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_gate: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    scale: float,
    rule: str,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_gate, initial_state; empty for those that were ``None``."""
    request = _request(q, k, v, beta, log_gate, initial_state, cu_seqlens, scale, rule, qk_l2norm)
    grads = native.fused_backward(request, saved, grad_o, grad_final_state)
    return present(grads, k)


register_gradients(fused_op, fused_backward_op, num_tensors=6)


def run_fused(request: FusedRequest, *, in_place: bool = False) -> ScanResult:
    """Run a validated request, past torch's dispatcher where nothing needs it: in decoding that costs more than the work."""
    tensors = (request.q, request.k, request.v, request.beta, request.log_gate, request.initial_state)
    save = needs_gradient(*tensors)
    if not save and _is_plain_eager(request):
        result, status = native.fused_forward(request, save, in_place=in_place)
        if status:
            check_status(status, request)
        return result
    return ScanResult(*fused_op(*tensors, request.cu_seqlens, request.scale, request.rule, request.qk_l2norm, save))


def check_status(status: int, request: FusedRequest) -> None:
    """Raise for values outside the rule's domain, which the kernels notice in passing."""
    if status & 1 and request.beta is not None and validation.checks_values(request.beta):
        raise validation.beta_error(float(request.beta.min()))
    if status & 2 and request.log_gate is not None and validation.checks_values(request.log_gate):
        raise validation.gate_error(float(request.log_gate.max()))


def _is_plain_eager(request: FusedRequest) -> bool:
    """Whether no tracer, tensor subclass or transform is watching."""
    return (
        type(request.q) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


def _request(*arguments: Any) -> FusedRequest:
    """The operators' first arguments as a request."""
    return FusedRequest(**dict(zip(_FIELDS, arguments, strict=True)))
