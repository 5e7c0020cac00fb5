"""The scan as torch operators: schema, fake kernel and autograd formula, the same for every backend.

Registered at import, before any tracing, so that ``torch.compile(fullgraph=True)`` sees one opaque differentiable
operator whatever the length. Imports no optional package. :mod:`efla.scans.fused_ops` does the same for backends that
work out the rule's scalars themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from efla.scans.backends import get_backend
from efla.scans.operators import fake_result, needs_gradient, present, register_gradients
from efla.scans.types import ScanRequest, ScanResult

_FIELDS = (
    *("q", "k", "v", "log_decay", "erase", "write", "initial_state"),
    *("cu_seqlens", "scale", "chunk_size"),
)


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
def _(*arguments):  # type: ignore[no-untyped-def]
    *fields, backend, save = arguments
    request = _request(*fields)
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
    request = _request(q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, chunk_size)
    with without_autocast(k):
        grads = get_backend(backend).backward(request, saved, grad_o, grad_final_state)
    return present(grads, k)


register_gradients(scan_op, scan_backward_op, num_tensors=7)


def run_scan(request: ScanRequest, backend: str) -> ScanResult:
    """Run a validated request through the operator; keeps for the backward pass only what one will need."""
    tensors = request.tensors()
    save = needs_gradient(*tensors)
    return ScanResult(*scan_op(*tensors, request.cu_seqlens, request.scale, request.chunk_size, backend, save))


def without_autocast(x: Tensor) -> torch.autocast:
    """Switches autocast off: casting the inputs alone does not keep it from recasting inside."""
    # The meta device has no autocast of its own.
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def _request(*arguments: Any) -> ScanRequest:
    """The operators' first arguments as a request."""
    return ScanRequest(**dict(zip(_FIELDS, arguments, strict=True)))
