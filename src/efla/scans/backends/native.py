"""The CPU kernels of csrc/: forward, backward and decoding in C++, for every rule, on torch's own threads.

The kernels take the three scalars, or a rule's inputs (beta, log_gate); then they compute the scalars, their gradients and
the normalisation of keys. csrc/README.md is the map of the C++ code; csrc/tensors.h checks every tensor that it uses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _increment_version as increment_version

from efla import rules
from efla.native import kernels, materialize
from efla.native import missing as unavailable
from efla.rules import UpdateRule
from efla.scans import validation
from efla.scans.request import Backend, FastPath, ScanGradients, ScanRequest, ScanResult

MAX_WIDTH = 256
_TILE = 64  # tokens between two saved states: kTile in csrc/problem.h
_RULE_CODES: dict[str, int] = {} if kernels is None else kernels.rule_codes
_RAW = -1


def supports(k: Tensor, v: Tensor, dtype: torch.dtype) -> str | None:
    if k.device.type != "cpu":
        return f"runs on the CPU only (k is on {k.device})"
    if k.shape[3] > MAX_WIDTH or v.shape[3] > MAX_WIDTH:
        return f"takes head widths up to {MAX_WIDTH} (K = {k.shape[3]}, V = {v.shape[3]})"
    return None


def fuses(rule: UpdateRule) -> bool:
    """Whether the kernels compute this rule's scalars: those of ``efla.rules``, not a user's own."""
    return rule_code(rule) is not None


def rule_code(rule: UpdateRule) -> int | None:
    """The kernels' number of a rule, or ``None`` if it is a user's own."""
    return _RULE_CODES.get(rules.builtin_name(rule) or "")


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


def forward(request: ScanRequest, save: bool, in_place: bool = False) -> ScanResult:
    inputs = _inputs(request)
    v, initial_state = inputs[2], inputs[8]
    o = torch.empty(v.shape, dtype=v.dtype)
    # A state of another dtype or layout was copied, so there is nothing to overwrite.
    in_place = in_place and initial_state is not None and initial_state is request.initial_state
    final_state = initial_state if in_place else request.new_state(request.num_sequences)
    assert final_state is not None
    saved = torch.empty(_boundary_elements(request, inputs[9]) if save else 0, dtype=request.compute_dtype)
    status = kernels.forward(
        *inputs, o, None if in_place else final_state, saved if save else None, *_settings(request), in_place,
        validation.enabled, torch.get_num_threads(),
    )  # fmt: skip
    if status:  # some beta < 0 or some log_gate > 0
        validation.check_domain(request.beta, request.log_gate)
    if in_place:
        increment_version((final_state,))
    return ScanResult(o if o.dtype == request.v.dtype else o.to(request.v.dtype), final_state, saved)


def backward(request: ScanRequest, saved: Tensor, grad_o: Tensor, grad_final_state: Tensor | None) -> ScanGradients:
    inputs = _inputs(request)
    if grad_final_state is not None:
        grad_final_state = materialize(grad_final_state.to(request.compute_dtype)).contiguous()
    grads: list[Any] = [None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in inputs[:9]]
    kernels.backward(
        *inputs, saved, _rows(grad_o.to(inputs[2].dtype)), grad_final_state, *grads, *_settings(request),
        torch.get_num_threads(),
    )  # fmt: skip
    for index, x in enumerate((request.q, request.k, request.v)):
        grads[index] = grads[index].to(x.dtype)
    return ScanGradients(*grads)


def _inputs(request: ScanRequest) -> list[Any]:
    """The tensors of the request and cu_seqlens, in the layout that the kernels take."""
    dtype = request.compute_dtype
    q, k, v, *scalars, initial_state = request.tensors()
    rows = [_rows(x) for x in (q, k, v) if x is not None]
    if initial_state is not None:
        if initial_state.dtype != dtype:
            initial_state = initial_state.to(dtype)
        initial_state = materialize(initial_state).contiguous()
        if dtype == torch.float64 and request.k.dtype != dtype:
            rows = [x.double() for x in rows]
    cu_seqlens = None if request.cu_seqlens is None else request.cu_seqlens.to(torch.int64).contiguous()
    return [*rows, *(None if x is None else materialize(x) for x in scalars), initial_state, cu_seqlens]


def _settings(request: ScanRequest) -> tuple[int, str, float]:
    """The rule's code, which of q and k the kernels normalise, and the scale."""
    return _RULE_CODES[request.rule] if request.rule else _RAW, request.normalise, request.scale


def _boundary_elements(request: ScanRequest, cu_seqlens: Tensor | None) -> int:
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


def step_in_place(kernel: str, states: Sequence[Tensor | None], *arguments: Any) -> bool:
    """Run a kernel that decodes one token and updates ``states``. False if it does not take these tensors: nothing is changed.

    The caller then takes the general path, which computes on mixed dtypes and other layouts, or reports the mistake.
    """
    try:
        getattr(kernels, kernel)(*arguments, torch.get_num_threads())
    except (TypeError, ValueError):
        return False
    increment_version([x for x in states if x is not None])
    return True


def simd_level() -> str:
    """The instruction set in use, among those this CPU has; ``EFLA_SIMD`` forces one."""
    if kernels is None:
        return "none"
    return f"{kernels.active_simd()} (of {', '.join(kernels.simd_levels())})"


def _not_built(*arguments: object) -> None:
    return None


if kernels is not None:
    check_rules(kernels.rule_facts)
decode: FastPath = _not_built if kernels is None else kernels.attend
BACKEND = Backend(
    "native",
    forward,
    backward,
    decode=decode,
    unavailable=unavailable,
    supports=supports,
    fuses=fuses,
    saved_size=saved_size,
)
