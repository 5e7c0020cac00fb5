"""The scan and fused linear attention as torch operators: schema, fake kernel and autograd formula.

    operator            (*tensors, cu_seqlens, *settings, save) -> (o, final_state, saved)
    backward operator   (*tensors, cu_seqlens, saved, grad_o, grad_final_state, *settings) -> one gradient per tensor

q, k and v come first among the tensors; the others may be ``None``. The operators are registered at import, before any
tracing, so that ``torch.compile(fullgraph=True)`` sees one opaque differentiable operator for every length and backend.
``efla::scan`` takes the three scalars of a step. ``efla::fused_attention`` takes beta and log_gate, for a backend that
computes the scalars inside its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from efla.scans import validation
from efla.scans.backends import get_backend, native
from efla.scans.request import FusedRequest, ScanRequest, ScanResult

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_SCAN_FIELDS = (
    *("q", "k", "v", "log_decay", "erase", "write", "initial_state"),
    *("cu_seqlens", "scale", "chunk_size"),
)
_FUSED_FIELDS = (
    *("q", "k", "v", "beta", "log_gate", "initial_state"),
    *("cu_seqlens", "scale", "rule", "normalise"),
)


def fake_result(
    request: ScanRequest | FusedRequest, save: bool, saved_size: Callable[[], int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (o, final_state, saved) of the right sizes; ``saved_size`` is called for unpacked input only."""
    size: int | torch.SymInt = 0
    if save and (request.cu_seqlens is not None or isinstance(request.k.shape[1], torch.SymInt)):
        # How many chunks a packed batch has depends on its boundaries, which a fake tensor does not hold; and an exact size
        # that may be zero would split torch.export's dynamic length into cases.
        size = torch.library.get_ctx().new_dynamic_size()
    elif save:
        size = saved_size()
    saved = request.k.new_empty(size, dtype=request.compute_dtype)
    return request.v.new_empty(request.v.shape), request.new_state(request.num_sequences), saved


def register_gradients(operator: CustomOpDef, backward_operator: CustomOpDef, num_tensors: int) -> None:
    """Register the autograd formula of an operator and the fake kernel of its backward operator."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.settings = inputs[num_tensors + 1 : -1]
        ctx.save_for_backward(*inputs[: num_tensors + 1], output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    def backward(
        ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, _grad_saved: None
    ) -> tuple[Any, ...]:
        *tensors, cu_seqlens, saved = ctx.saved_tensors
        if grad_o is None:
            grad_o = torch.zeros_like(tensors[2])
        grads = backward_operator(*tensors, cu_seqlens, saved, grad_o, grad_final_state, *ctx.settings)
        kept = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
        return (*kept, None, *(None for _ in ctx.settings), None)

    def fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
        tensors = arguments[:num_tensors]
        return tuple(tensors[1].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)

    operator.register_autograd(backward, setup_context=setup_context)
    backward_operator.register_fake(fake_gradients)


def empty_for_none(grads: Iterable[Tensor | None], like: Tensor) -> tuple[Any, ...]:
    """Operators return tensors only: an absent gradient is an empty one."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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
    request = _scan_request(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size)
    with without_autocast(k):
        o, final_state, saved = get_backend(backend).forward(request, save)
    return o, final_state, saved


@scan_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    *fields, backend, save = arguments
    request = _scan_request(*fields)
    return fake_result(request, save, lambda: get_backend(backend).saved_size(request.k, request.v, request.chunk_size))


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
    request = _scan_request(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size)
    with without_autocast(k):
        grads = get_backend(backend).backward(request, saved, grad_o, grad_final_state)
    return empty_for_none(grads, k)


register_gradients(scan_op, scan_backward_op, num_tensors=7)


def run_scan(request: ScanRequest, backend: str) -> ScanResult:
    """Run a validated request through the operator; saves for the backward pass only if there will be one."""
    tensors = request.tensors()
    save = needs_gradient(*tensors)
    return ScanResult(*scan_op(*tensors, request.cu_seqlens, request.scale, request.chunk_size, backend, save))


def without_autocast(x: Tensor) -> torch.autocast:
    """Switch autocast off: it would cast again inside, even if the inputs are cast."""
    # The meta device has no autocast of its own.
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


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
    normalise: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final_state, saved) of linear attention by ``rule``; ``saved`` is empty unless ``save``."""
    request = _fused_request(q, k, v, beta, log_gate, initial_state, cu_seqlens, scale, rule, normalise)
    result, status = native.fused_forward(request, save)
    check_status(status, request)
    return result.o, result.final_state, result.saved


@fused_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    *fields, save = arguments
    request = _fused_request(*fields)
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
    normalise: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_gate, initial_state; empty for those that were ``None``."""
    request = _fused_request(q, k, v, beta, log_gate, initial_state, cu_seqlens, scale, rule, normalise)
    grads = native.fused_backward(request, saved, grad_o, grad_final_state)
    return empty_for_none(grads, k)


register_gradients(fused_op, fused_backward_op, num_tensors=6)


def run_fused(request: FusedRequest, *, in_place: bool = False) -> ScanResult:
    """Run a validated request, without torch's dispatcher where possible: in decoding it costs more than the kernel."""
    tensors = (request.q, request.k, request.v, request.beta, request.log_gate, request.initial_state)
    save = needs_gradient(*tensors)
    if not save and _is_plain_eager(request):
        result, status = native.fused_forward(request, save, in_place=in_place)
        if status:
            check_status(status, request)
        return result
    return ScanResult(*fused_op(*tensors, request.cu_seqlens, request.scale, request.rule, request.normalise, save))


def check_status(status: int, request: FusedRequest) -> None:
    """Raise for values outside the rule's domain, which the kernels report."""
    if status & 1 and request.beta is not None and validation.checks_values(request.beta):
        raise validation.beta_error(float(request.beta.min()))
    if status & 2 and request.log_gate is not None and validation.checks_values(request.log_gate):
        raise validation.gate_error(float(request.log_gate.max()))


def _is_plain_eager(request: FusedRequest) -> bool:
    """Whether no tracer, tensor subclass or function transform is active."""
    return (
        type(request.q) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


def _scan_request(*arguments: Any) -> ScanRequest:
    """The first arguments of ``efla::scan`` as a request."""
    return ScanRequest(**dict(zip(_SCAN_FIELDS, arguments, strict=True)))


def _fused_request(*arguments: Any) -> FusedRequest:
    """The first arguments of ``efla::fused_attention`` as a request."""
    return FusedRequest(**dict(zip(_FUSED_FIELDS, arguments, strict=True)))
