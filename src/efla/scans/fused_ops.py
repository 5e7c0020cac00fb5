"""Linear attention as one torch operator, for a backend that works out the rule's scalars inside its kernels.

The same shape as :mod:`efla.scans.torch_ops`, one level up: inputs are beta and log_gate, not the three scalars.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efla.scans import validation
from efla.scans.backends import native
from efla.scans.torch_ops import empty_if_none, needs_gradient
from efla.scans.types import FusedRequest, ScanResult


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
def _(q, k, v, beta, log_gate, initial_state, cu_seqlens, scale, rule, qk_l2norm, save):  # type: ignore[no-untyped-def]
    request = _request(q, k, v, beta, log_gate, initial_state, cu_seqlens, scale, rule, qk_l2norm)
    size: int | torch.SymInt = 0
    if save and cu_seqlens is not None:
        size = torch.library.get_ctx().new_dynamic_size()
    elif save:
        size = native.saved_size(k, v)
    saved = k.new_empty(size, dtype=request.compute_dtype)
    return v.new_empty(v.shape), request.new_state(request.num_sequences), saved


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
    d_q, d_k, d_v, d_beta, d_log_gate, d_initial = (empty_if_none(grad, k) for grad in grads)
    return d_q, d_k, d_v, d_beta, d_log_gate, d_initial


@fused_backward_op.register_fake
def _(q, k, v, beta, log_gate, initial_state, *others):  # type: ignore[no-untyped-def]
    inputs = (q, k, v, beta, log_gate, initial_state)
    return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale, ctx.rule, ctx.qk_l2norm, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_o, grad_final_state, _grad_saved):  # type: ignore[no-untyped-def]
    *tensors, cu_seqlens, saved = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(tensors[2])
    grads = fused_backward_op(*tensors, cu_seqlens, saved, grad_o, grad_final_state, ctx.scale, ctx.rule, ctx.qk_l2norm)
    kept = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
    return (*kept, None, None, None, None, None)


fused_op.register_autograd(_backward, setup_context=_setup_context)


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


def _request(
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
) -> FusedRequest:
    return FusedRequest(
        q=q,
        k=k,
        v=v,
        beta=beta,
        log_gate=log_gate,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        scale=scale,
        rule=rule,
        qk_l2norm=qk_l2norm,
    )
