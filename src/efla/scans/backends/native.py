"""The CPU kernels of csrc/: forward, backward and decoding in C++, for every rule, on torch's own threads.

The kernels take raw scalars, or a rule's inputs (beta, log_gate) and compute the scalars, their gradients and the
normalisation of keys themselves. Addresses and strides go over as integers: a call costs a few microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from efla import extension
from efla.extension import DTYPE_CODES
from efla.rules import UpdateRule
from efla.scans.types import FusedGradients, FusedRequest, ScanGradients, ScanRequest, ScanResult

name = "native"
own_autograd = False

MAX_WIDTH = 256
_TILE = 64  # tokens between two saved states
_RULE_CODES = {
    rule: code
    for code, rule in enumerate(
        (
            "linear", "ssd", "delta", "rk2", "rk4", "implicit_euler", "crank_nicolson", "efla",
            "gated_delta", "gated_efla", "gated_efla_log",
        )
    )
}  # fmt: skip
_RAW = -1
_ABSENT = (0, 0, 0, 0)


def unavailable() -> str | None:
    return extension.missing()


def supports(k: Tensor, v: Tensor, dtype: torch.dtype) -> str | None:
    if k.device.type != "cpu":
        return f"runs on the CPU only (k is on {k.device})"
    if k.shape[3] > MAX_WIDTH or v.shape[3] > MAX_WIDTH:
        return f"takes head widths up to {MAX_WIDTH} (K = {k.shape[3]}, V = {v.shape[3]})"
    return None


def fuses(rule: UpdateRule) -> bool:
    """Whether the kernels know this rule: ours do, a user's own goes through its torch coefficients."""
    return rule.name in _RULE_CODES and type(rule).__module__.startswith("efla.rules.")


def saved_size(k: Tensor, v: Tensor, chunk_size: int = 0) -> int:
    """Elements kept for the backward pass of an unpacked call: the states at tile borders, in the kernels' layout."""
    batch, length, _, key_dim = k.shape
    num_borders = torch.sym_max((length + _TILE - 1) // _TILE - 1, 0)
    return batch * num_borders * v.shape[2] * _round_up(v.shape[3], 32) * _round_up(key_dim, 16)


def forward(request: ScanRequest, save: bool) -> ScanResult:
    scalars = (request.log_decay, request.erase, request.write)
    return _forward(request, scalars, _RAW, False, save)[0]


def fused_forward(request: FusedRequest, save: bool, *, in_place: bool = False) -> tuple[ScanResult, int]:
    """The result and the kernels' status bits: 1 if some beta < 0, 2 if some log_gate > 0."""
    scalars = (request.log_gate, request.beta, None)
    return _forward(request, scalars, _RULE_CODES[request.rule], request.qk_l2norm, save, in_place)


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    scalars = (request.log_decay, request.erase, request.write)
    d_q, d_k, d_v, d_scalars, d_initial = _backward(request, scalars, _RAW, False, saved, grad_o, grad_final_state)
    d_log_decay, d_erase, d_write = d_scalars
    assert d_write is not None
    return ScanGradients(d_q, d_k, d_v, d_log_decay, d_erase, d_write, d_initial)


def fused_backward(
    request: FusedRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None
) -> FusedGradients:
    scalars = (request.log_gate, request.beta, None)
    code = _RULE_CODES[request.rule]
    d_q, d_k, d_v, d_scalars, d_initial = _backward(
        request, scalars, code, request.qk_l2norm, saved, grad_o, grad_final_state
    )
    d_log_gate, d_beta, _ = d_scalars
    return FusedGradients(d_q, d_k, d_v, d_beta, d_log_gate, d_initial)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_gate: Tensor | None,
    rule: str | UpdateRule,
    qk_l2norm: bool,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """The whole call in one step, or ``None`` if it is not plain inference on the CPU: then the general path decides.

    Nothing but C++ runs between the tensors and the kernels, input checks included; what they decline is explained by
    the general path's checks.
    """
    if torch.compiler.is_compiling() or not _has_eager_path or torch.is_grad_enabled():
        return None
    code = _RULE_CODES.get(rule, _RAW) if type(rule) is str else _RAW
    if code == _RAW or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    result = _native.attend(
        q, k, v, beta, log_gate, code, qk_l2norm, scale, initial_state, output_final_state, in_place,
        torch.get_num_threads(),
    )  # fmt: skip
    return None if type(result) is int else result


_Scalars = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Arguments(NamedTuple):
    """What both directions hand to the kernels, and the tensors that must outlive the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    scalars: _Scalars
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    sizes: tuple[int, ...]


def _arguments(request: ScanRequest | FusedRequest, scalars: _Scalars) -> _Arguments:
    q, k, v = (_rows(x) for x in (request.q, request.k, request.v))
    initial_state, cu_seqlens = request.initial_state, request.cu_seqlens
    if initial_state is not None:
        if initial_state.dtype != request.compute_dtype:
            initial_state = initial_state.to(request.compute_dtype)
        initial_state = initial_state.contiguous()
    if initial_state is not None and initial_state.dtype == torch.float64 and k.dtype != torch.float64:
        q, k, v = q.double(), k.double(), v.double()
    num_sequences = k.shape[0]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
        num_sequences = cu_seqlens.shape[0] - 1
    batch, length, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    threads = torch.get_num_threads()
    sizes = (batch, length, num_sequences, key_heads, value_heads, key_dim, value_dim, threads)
    return _Arguments(q, k, v, scalars, initial_state, cu_seqlens, sizes)


def _forward(
    request: ScanRequest | FusedRequest, scalars: _Scalars, rule: int, l2norm: bool, save: bool, in_place: bool = False
) -> tuple[ScanResult, int]:
    a = _arguments(request, scalars)
    o = torch.empty(a.v.shape, dtype=a.v.dtype)
    if in_place and a.initial_state is request.initial_state and a.initial_state is not None:
        final_state = a.initial_state
    else:
        final_state = request.new_state(a.sizes[2])
    saved = torch.empty(_border_elements(a) if save else 0, dtype=request.compute_dtype)
    first, second, third = a.scalars
    status: int = _native.forward(
        DTYPE_CODES[a.k.dtype], rule, l2norm, request.scale,
        *_strided(a.q), *_strided(a.k), *_strided(a.v), *_strided(o),
        *_strided(first), *_strided(second), *_strided(third),
        _address(a.initial_state), final_state.data_ptr(), saved.data_ptr() if save else 0, _address(a.cu_seqlens),
        *a.sizes,
    )  # fmt: skip
    return ScanResult(o if o.dtype == request.v.dtype else o.to(request.v.dtype), final_state, saved), status


def _backward(
    request: ScanRequest | FusedRequest,
    scalars: _Scalars,
    rule: int,
    l2norm: bool,
    saved: Tensor,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, _Scalars, Tensor | None]:
    a = _arguments(request, scalars)
    grad_o = _rows(grad_o.to(a.v.dtype))
    if grad_final_state is not None:
        grad_final_state = grad_final_state.to(request.compute_dtype).contiguous()
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype) for x in (a.q, a.k, a.v))
    d_first, d_second, d_third = (None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in a.scalars)
    d_initial = None if a.initial_state is None else torch.empty_like(a.initial_state)
    first, second, third = a.scalars
    _native.backward(
        DTYPE_CODES[a.k.dtype], rule, l2norm, request.scale,
        *_strided(a.q), *_strided(a.k), *_strided(a.v), *_strided(grad_o),
        *_strided(first), *_strided(second), *_strided(third),
        _address(a.initial_state), _address(grad_final_state), _address(saved), _address(a.cu_seqlens),
        d_q.data_ptr(), d_k.data_ptr(), d_v.data_ptr(), _address(d_first), _address(d_second), _address(d_third),
        _address(d_initial),
        *a.sizes,
    )  # fmt: skip
    d_q, d_k, d_v = d_q.to(request.q.dtype), d_k.to(request.k.dtype), d_v.to(request.v.dtype)
    return d_q, d_k, d_v, (d_first, d_second, d_third), d_initial


def _border_elements(a: _Arguments) -> int:
    _, length, num_sequences, _, value_heads, key_dim, value_dim, _ = a.sizes
    count: int = _native.border_count(_address(a.cu_seqlens), num_sequences, length, value_heads, key_dim, value_dim)
    return count


def _rows(x: Tensor) -> Tensor:
    """x with its last axis contiguous; other strides are the kernels' business."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _strided(x: Tensor | None) -> tuple[int, int, int, int]:
    if x is None:
        return _ABSENT
    strides = x.stride()
    return x.data_ptr(), strides[0], strides[1], strides[2]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def simd_level() -> str:
    """The instruction set in use, among those this CPU has; ``EFLA_SIMD`` forces one."""
    if _native is None:
        return "none"
    return f"{_native.active_simd()} (of {', '.join(_native.simd_levels())})"


_native = extension.module
_has_eager_path = _native is not None and _native.set_tensor_type(Tensor)
