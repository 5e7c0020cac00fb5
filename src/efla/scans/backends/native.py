"""The CPU kernels of csrc/: forward, backward and decoding in C++, for every rule, on torch's own threads.

The kernels take the three scalars, or a rule's inputs (beta, log_gate); then they compute the scalars, their gradients and
the normalisation of keys. csrc/README.md is the map of the C++ code; csrc/tensors.h checks every tensor that it uses.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _increment_version as increment_version

from efla import rules
from efla.native import kernels, materialize, missing
from efla.rules import UpdateRule
from efla.scans import validation
from efla.scans.request import FusedGradients, FusedRequest, ScanGradients, ScanRequest, ScanResult

name = "native"
own_autograd = False

MAX_WIDTH = 256
_TILE = 64  # tokens between two saved states: kTile in csrc/problem.h
_RULE_CODES: dict[str, int] = {} if kernels is None else kernels.rule_codes
_RAW = -1


def unavailable() -> str | None:
    return missing()


def supports(k: Tensor, v: Tensor, dtype: torch.dtype) -> str | None:
    if k.device.type != "cpu":
        return f"runs on the CPU only (k is on {k.device})"
    if k.shape[3] > MAX_WIDTH or v.shape[3] > MAX_WIDTH:
        return f"takes head widths up to {MAX_WIDTH} (K = {k.shape[3]}, V = {v.shape[3]})"
    return None


def fuses(rule: UpdateRule) -> bool:
    """Whether the kernels compute this rule's coefficients. Rules defined outside ``efla.rules`` use their own."""
    return rule.name in _RULE_CODES and type(rule).__module__.startswith("efla.rules.")


def check_rules(facts: Mapping[str, Mapping[str, bool]]) -> None:
    """Raise unless the kernels' table of rules (csrc/rule_table.h) agrees with the classes in ``efla.rules``."""
    for name, properties in facts.items():
        rule = rules.get(name)
        for field in ("needs_beta", "needs_gate", "has_decay", "has_erase"):
            if getattr(rule, field) != properties[field]:
                raise RuntimeError(
                    f"{rule!r} has {field} = {getattr(rule, field)}, the compiled kernels have {properties[field]}; "
                    "make csrc/rule_table.h and efla.rules agree and reinstall efla"
                )


def saved_size(k: Tensor, v: Tensor, chunk_size: int = 0) -> int:
    """Elements kept for the backward pass of an unpacked call: the states at tile boundaries, in the kernels' layout."""
    batch, length, _, key_dim = k.shape
    num_boundaries = torch.sym_max((length + _TILE - 1) // _TILE - 1, 0)
    return batch * num_boundaries * v.shape[2] * _round_up(v.shape[3], 32) * _round_up(key_dim, 16)


def forward(request: ScanRequest, save: bool) -> ScanResult:
    return _forward(request, save)[0]


def fused_forward(request: FusedRequest, save: bool, *, in_place: bool = False) -> tuple[ScanResult, int]:
    """The result and the kernels' status bits: 1 if some beta < 0, 2 if some log_gate > 0."""
    return _forward(request, save, in_place)


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    d_q, d_k, d_v, d_scalars, d_initial = _backward(request, saved, grad_o, grad_final_state)
    d_log_decay, d_erase, d_write, _, _ = d_scalars
    assert d_write is not None
    return ScanGradients(d_q, d_k, d_v, d_log_decay, d_erase, d_write, d_initial)


def fused_backward(
    request: FusedRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None
) -> FusedGradients:
    d_q, d_k, d_v, d_scalars, d_initial = _backward(request, saved, grad_o, grad_final_state)
    _, _, _, d_log_gate, d_beta = d_scalars
    return FusedGradients(d_q, d_k, d_v, d_beta, d_log_gate, d_initial)


class _Inputs(NamedTuple):
    """What both directions pass to the kernels, in their layout and order."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    log_gate: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


def _inputs(request: ScanRequest | FusedRequest) -> _Inputs:
    q, k, v = (_rows(x) for x in (request.q, request.k, request.v))
    initial_state, cu_seqlens = request.initial_state, request.cu_seqlens
    if initial_state is not None:
        if initial_state.dtype != request.compute_dtype:
            initial_state = initial_state.to(request.compute_dtype)
        initial_state = materialize(initial_state).contiguous()
    if initial_state is not None and initial_state.dtype == torch.float64 and k.dtype != torch.float64:
        q, k, v = q.double(), k.double(), v.double()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    scalars: tuple[Tensor | None, ...]
    if isinstance(request, FusedRequest):
        scalars = (None, None, None, request.log_gate, request.beta)
    else:
        scalars = (request.log_decay, request.erase, request.write, None, None)
    scalars = tuple(None if x is None else materialize(x) for x in scalars)
    return _Inputs._make((q, k, v, *scalars, initial_state, cu_seqlens))


def _settings(request: ScanRequest | FusedRequest) -> tuple[int, str, float]:
    """The rule's code, which of q and k the kernels normalise, and the scale."""
    if isinstance(request, FusedRequest):
        return _RULE_CODES[request.rule], request.normalise, request.scale
    return _RAW, "", request.scale


def _forward(request: ScanRequest | FusedRequest, save: bool, in_place: bool = False) -> tuple[ScanResult, int]:
    inputs = _inputs(request)
    o = torch.empty(inputs.v.shape, dtype=inputs.v.dtype)
    # A state of another dtype or layout was copied, so there is nothing to overwrite.
    in_place = in_place and request.initial_state is not None and inputs.initial_state is request.initial_state
    final_state = inputs.initial_state if in_place else request.new_state(request.num_sequences)
    assert final_state is not None
    saved = torch.empty(_boundary_elements(request, inputs.cu_seqlens) if save else 0, dtype=request.compute_dtype)
    status: int = kernels.forward(
        *inputs, o, None if in_place else final_state, saved if save else None, *_settings(request), in_place,
        validation.enabled, torch.get_num_threads(),
    )  # fmt: skip
    if in_place:
        increment_version((final_state,))
    return ScanResult(o if o.dtype == request.v.dtype else o.to(request.v.dtype), final_state, saved), status


def _backward(
    request: ScanRequest | FusedRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor | None]:
    """Gradients of q, k, v, of the five scalars in the order of ``_Inputs``, and of the initial state."""
    inputs = _inputs(request)
    if grad_final_state is not None:
        grad_final_state = materialize(grad_final_state.to(request.compute_dtype)).contiguous()
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype) for x in inputs[:3])
    d_scalars = [None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in inputs[3:8]]
    d_initial = None if inputs.initial_state is None else torch.empty_like(inputs.initial_state)
    kernels.backward(
        *inputs, saved, _rows(grad_o.to(inputs.v.dtype)), grad_final_state, d_q, d_k, d_v, *d_scalars, d_initial,
        *_settings(request), torch.get_num_threads(),
    )  # fmt: skip
    return d_q.to(request.q.dtype), d_k.to(request.k.dtype), d_v.to(request.v.dtype), d_scalars, d_initial


def _boundary_elements(request: ScanRequest | FusedRequest, cu_seqlens: Tensor | None) -> int:
    length, (value_heads, value_dim), key_dim = request.k.shape[1], request.v.shape[2:], request.k.shape[3]
    count: int = kernels.boundary_count(cu_seqlens, request.num_sequences, length, value_heads, key_dim, value_dim)
    return count


def _rows(x: Tensor) -> Tensor:
    """x with its last axis contiguous; other strides are the kernels' business."""
    x = materialize(x)
    if x.stride(3) == 1 or x.shape[3] == 1:
        return x
    return x.contiguous() if x.numel() else x.new_empty(x.shape)  # contiguous() keeps the strides of an empty tensor


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def mixer_step(*arguments: Any) -> None:
    """One decoded token of a linear-attention layer, between its products; see ``LinearAttention._decode``.

    Updates conv_state and memory in place. Arguments: q, k, v, b, a, g, q_weight, k_weight, v_weight, conv_state, memory,
    A_log, dt_bias, norm_weight, y, rule, qk_l2norm, scale, beta_factor, eps.
    """
    *tensors, rule, qk_l2norm, scale, beta_factor, eps = arguments
    kernels.mixer_step(*tensors, _RULE_CODES[rule.name], qk_l2norm, scale, beta_factor, eps, torch.get_num_threads())
    increment_version([x for x in tensors[9:11] if x is not None])


def simd_level() -> str:
    """The instruction set in use, among those this CPU has; ``EFLA_SIMD`` forces one."""
    if kernels is None:
        return "none"
    return f"{kernels.active_simd()} (of {', '.join(kernels.simd_levels())})"


def _not_built(*arguments: object) -> None:
    return None


if kernels is not None:
    check_rules(kernels.rule_facts)
attend: Callable[..., tuple[Tensor, Tensor | None] | None] = _not_built if kernels is None else kernels.attend
"""One C++ call for plain inference on the CPU. Returns ``None`` where the general path must run it or report an error.

attend(q, k, v, beta, log_gate, rule, qk_l2norm, scale, initial_state, output_final_state, in_place, check_domain)"""
