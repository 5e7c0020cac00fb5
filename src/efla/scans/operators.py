"""The scan in torch: one operator with its schema, fake kernel and autograd formula, and the short way around it.

    efla::scan            (*tensors, cu_seqlens, *settings, save) -> (o, final_state, saved)
    efla::scan_backward   (*tensors, cu_seqlens, saved, grad_o, grad_final_state, *settings) -> one gradient per tensor

The tensors are those of ``ScanRequest.tensors()``. The operators are registered at import, before any tracing, so that
``torch.compile(fullgraph=True)`` sees one opaque differentiable operator for every rule, length and backend. In plain eager
mode :func:`run` calls the backend without torch's dispatcher, which costs more than the kernel of a short call.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from efla.phi import forward_mode
from efla.scans.backends import get_backend
from efla.scans.request import Backend, ScanGradients, ScanRequest

_NUM_TENSORS = len(ScanGradients._fields)
_NUM_INPUTS = _NUM_TENSORS + 1  # and cu_seqlens
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def run(request: ScanRequest, backend: Backend, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """(o, final_state) of a validated request, differentiable where a gradient is needed.

    in_place: the final state may overwrite the initial one; ignored where a gradient is needed.
    """
    tensors = request.tensors()
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if backend.own_autograd and not torch.compiler.is_compiling():
        with without_autocast(request.k):
            return backend.forward(request, save)[:2]
    if request.k.is_meta or not _is_plain_eager(tensors):
        return scan_op(*tensors, request.cu_seqlens, *_settings(request), backend.name, save)[:2]
    if save:
        return _Scan.apply(backend, request, *tensors)  # type: ignore[no-untyped-call, no-any-return]
    with without_autocast(request.k):
        return backend.forward(request, save, in_place)[:2]


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off: it would cast again inside, even if the inputs are cast."""
    # The meta device has no autocast of its own.
    device = "cpu" if x.is_meta else x.device.type
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _is_plain_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no tracer, tensor subclass or function transform must see the call."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in _PLAIN for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not forward_mode()
    )


def _settings(request: ScanRequest) -> tuple[float, int, str, str]:
    return request.scale, request.chunk_size, request.rule, request.normalise


def _request(*arguments: Any) -> ScanRequest:
    """A request from its tensors, cu_seqlens and settings."""
    names = (*ScanGradients._fields, "cu_seqlens", "scale", "chunk_size", "rule", "normalise")
    return ScanRequest(**dict(zip(names, arguments, strict=True)))


class _Scan(torch.autograd.Function):
    """The differentiable scan of plain eager mode."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, request: ScanRequest, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        with without_autocast(request.k):
            o, final_state, saved = backend.forward(request, save=True)
        ctx.save_for_backward(*tensors, request.cu_seqlens, saved)
        ctx.backend, ctx.settings = backend, _settings(request)
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        *inputs, saved = ctx.saved_tensors
        if grad_o is None:
            grad_o = torch.zeros_like(inputs[2])
        request = _request(*inputs, *ctx.settings)
        with without_autocast(request.k):
            return (None, None, *ctx.backend.backward(request, saved, grad_o, grad_final_state))


# The types of the operators' arguments. The tensors and their order are those of ScanGradients.
_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? erase, Tensor? write, Tensor? log_gate, Tensor? beta, "
    "Tensor? initial_state, Tensor? cu_seqlens"
)
_SETTINGS = "float scale, SymInt chunk_size, str rule, str normalise, str backend"


@torch.library.custom_op(
    "efla::scan", mutates_args=(), schema=f"({_TENSORS}, {_SETTINGS}, bool save) -> (Tensor, Tensor, Tensor)"
)
def scan_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final_state, saved) of the recurrence; ``saved`` is empty unless ``save``."""
    *fields, backend, save = arguments
    request = _request(*fields)
    with without_autocast(request.k):
        return get_backend(backend).forward(request, save)


@scan_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    *fields, backend, save = arguments
    request = _request(*fields)
    size: int | torch.SymInt = 0
    if save and (request.cu_seqlens is not None or isinstance(request.k.shape[1], torch.SymInt)):
        # How many chunks a packed batch has depends on its boundaries, which a fake tensor does not hold; and an exact size
        # that may be zero would split torch.export's dynamic length into cases.
        size = torch.library.get_ctx().new_dynamic_size()
    elif save:
        size = get_backend(backend).saved_size(request.k, request.v, request.chunk_size)
    saved = request.k.new_empty(size, dtype=request.compute_dtype)
    return request.v.new_empty(request.v.shape), request.new_state(request.num_sequences), saved


@torch.library.custom_op(
    "efla::scan_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor saved, Tensor grad_o, Tensor? grad_final_state, {_SETTINGS})"
    f" -> ({', '.join(['Tensor'] * _NUM_TENSORS)})",
)
def scan_backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """One gradient per tensor; operators return tensors only, so that of ``None`` is an empty one."""
    inputs, (saved, grad_o, grad_final_state, *settings, backend) = arguments[:_NUM_INPUTS], arguments[_NUM_INPUTS:]
    request = _request(*inputs, *settings)
    with without_autocast(request.k):
        grads = get_backend(backend).backward(request, saved, grad_o, grad_final_state)
    return tuple(request.k.new_empty(0) if grad is None else grad for grad in grads)


@scan_backward_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    tensors = arguments[:_NUM_TENSORS]
    return tuple(tensors[1].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.settings = inputs[_NUM_INPUTS:-1]
    ctx.save_for_backward(*inputs[:_NUM_INPUTS], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, _grad_saved: None) -> tuple[Any, ...]:
    *tensors, cu_seqlens, saved = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(tensors[2])
    grads = scan_backward_op(*tensors, cu_seqlens, saved, grad_o, grad_final_state, *ctx.settings)
    present = [None if x is None else grad for x, grad in zip(tensors, grads, strict=True)]
    return (*present, None, *(None for _ in ctx.settings), None)


scan_op.register_autograd(_backward, setup_context=_setup_context)
