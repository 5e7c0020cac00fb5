"""The scan as torch operators: schema, fake kernel and autograd formula, the same for every backend.

Registered at import, before any tracing, so that ``torch.compile(fullgraph=True)`` sees one opaque differentiable
operator whatever the length. Imports no optional package. :mod:`efla.scans.fused_ops` does the same for backends that
work out the rule's scalars themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efla.scans.backends import get_backend
from efla.scans.types import ScanRequest, ScanResult


@torch.library.custom_op("efla::scan", mutates_args=())
def scan_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    backend: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final_state, saved) of the recurrence; ``saved`` is empty unless ``save``."""
    request = _request(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size)
    with without_autocast(k):
        o, final_state, saved = get_backend(backend).forward(request, save)
    return o, final_state, saved


@scan_op.register_fake
def _(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size, backend, save):  # type: ignore[no-untyped-def]
    request = _request(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size)
    size: int | torch.SymInt = 0
    if save and cu_seqlens is not None:
        # How many chunks a packed batch has depends on its borders, which a fake tensor does not hold.
        size = torch.library.get_ctx().new_dynamic_size()
    elif save:
        size = get_backend(backend).saved_size(k, v, chunk_size)
    saved = k.new_empty(size, dtype=request.compute_dtype)
    return v.new_empty(v.shape), request.new_state(request.num_sequences), saved


@torch.library.custom_op("efla::scan_backward", mutates_args=())
def scan_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Tensor,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    scale: float,
    chunk_size: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, erase, write, initial_state; empty for those that were ``None``."""
    request = _request(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size)
    with without_autocast(k):
        grads = get_backend(backend).backward(request, saved, grad_o, grad_final_state)
    q, k, v, log_decay, erase, write, initial_state = (empty_if_none(grad, k) for grad in grads)
    return q, k, v, log_decay, erase, write, initial_state


@scan_backward_op.register_fake
def _(q, k, v, log_decay, erase, write, initial_state, *others):  # type: ignore[no-untyped-def]
    inputs = (q, k, v, log_decay, erase, write, initial_state)
    return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.scale, ctx.chunk_size, ctx.backend, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_o, grad_final_state, _grad_saved):  # type: ignore[no-untyped-def]
    *tensors, cu_seqlens, saved = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(tensors[2])
    grads = scan_backward_op(
        *tensors, cu_seqlens, saved, grad_o, grad_final_state, ctx.scale, ctx.chunk_size, ctx.backend
    )
    kept = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
    return (*kept, None, None, None, None, None)


scan_op.register_autograd(_backward, setup_context=_setup_context)


def run_scan(request: ScanRequest, backend: str) -> ScanResult:
    """Run a validated request through the operator; keeps for the backward pass only what one will need."""
    tensors = request.tensors()
    save = needs_gradient(*tensors)
    return ScanResult(*scan_op(*tensors, request.cu_seqlens, request.scale, request.chunk_size, backend, save))


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def empty_if_none(grad: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors only: an absent gradient is an empty one."""
    return like.new_empty(0) if grad is None else grad


def without_autocast(x: Tensor) -> torch.autocast:
    """Switches autocast off: casting the inputs alone does not keep it from recasting inside."""
    return torch.autocast(x.device.type, enabled=False)


def _request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> ScanRequest:
    return ScanRequest(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        erase=erase,
        write=write,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        scale=scale,
        chunk_size=chunk_size,
    )
