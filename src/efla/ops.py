"""flash-linear-attention's function names, arguments and layout on top of :func:`efla.linear_attention`.

A user swaps ``from fla.ops.delta_rule import chunk_delta_rule`` for ``from efla.ops import chunk_delta_rule``.
q, k: [B, T, H, K]; v: [B, T, HV, V]; beta, g: [B, T, HV] with g the logarithm of the gate; states: [N, HV, K, V].

Arguments, their order and defaults are those of flash-linear-attention 0.6. ``chunk_`` and ``fused_recurrent_`` compute
the same: the backend decides how to run. Accepted and not needed here: ``cu_seqlens_cpu``, ``chunk_indices`` (copies for
the GPU). Refused unless left at their defaults: ``cp_context``, ``head_first``, ``gk``, ``gv`` and, in gated
``fused_recurrent_`` functions, ``chunk_size``.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from efla.scans.api import linear_attention

__all__ = [
    "chunk_delta_rule",
    "chunk_efla",
    "chunk_gated_delta_rule",
    "chunk_gated_efla",
    "chunk_gdn",
    "fused_recurrent_delta_rule",
    "fused_recurrent_efla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_efla",
    "fused_recurrent_gdn",
    "naive_chunk_gated_delta_rule",
    "naive_recurrent_gated_delta_rule",
]

Result = tuple[Tensor, Tensor | None]

_REFUSED = {
    "cp_context": "split sequences over ranks with efla.train instead",
    "head_first": "inputs are [B, T, H, D]; pass x.transpose(1, 2)",
    "gk": "a gate has one value per head, not one per key channel; pass g",
    "gv": "a gate has one value per head, not one per value channel; pass g",
    "chunk_size": "a fused_recurrent_ function has no chunks; leave it at 64, or call the chunk_ function",
}


def _chunk(rule: str) -> Callable[..., Result]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        *,
        chunk_size: int = 64,
        head_first: bool = False,
    ) -> Result:
        _refuse(head_first=head_first)
        options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
        return _run(rule, q, k, v, beta, None, *options, chunk_size=chunk_size)

    return function


def _fused_recurrent(rule: str) -> Callable[..., Result]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Result:
        options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
        return _run(rule, q, k, v, beta, None, *options)

    return function


def _chunk_gated(rule: str) -> Callable[..., Result]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        cp_context: object = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        chunk_size: int = 64,
        head_first: bool = False,
        transpose_state_layout: bool | None = None,
    ) -> Result:
        _refuse(cp_context=cp_context, head_first=head_first)
        g = _gate(g, A_log, dt_bias) if use_gate_in_kernel else g
        beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
        state_v_first = _state_layout(state_v_first, transpose_state_layout)
        return _run(rule, q, k, v, beta, g, *options, state_v_first=state_v_first, chunk_size=chunk_size)

    return function


def _fused_recurrent_gated(rule: str, ungated: str) -> Callable[..., Result]:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        gk: Tensor | None = None,
        gv: Tensor | None = None,
        beta: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        *,
        chunk_size: int = 64,
        head_first: bool = False,
        transpose_state_layout: bool | None = None,
    ) -> Result:
        _refuse(gk=gk, gv=gv, head_first=head_first, chunk_size=None if chunk_size == 64 else chunk_size)
        g = _gate(g, A_log, dt_bias) if use_gate_in_kernel else g
        beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
        state_v_first = _state_layout(state_v_first, transpose_state_layout)
        return _run(ungated if g is None else rule, q, k, v, beta, g, *options, state_v_first=state_v_first)

    return function


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:
    """The gated delta rule token by token (backend ``reference``), in float32 or wider. Mind the order: beta, then g."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    options = (scale, initial_state, output_final_state, False, None)
    return _run("gated_delta", q, k, v, beta, g, *options, backend="reference")


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:
    """The gated delta rule chunk by chunk in torch (backend ``chunked``), in float32 or wider."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    options = (scale, initial_state, output_final_state, False, None)
    return _run("gated_delta", q, k, v, beta, g, *options, chunk_size=chunk_size, backend="chunked")


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"efla.ops takes no {name}: {_REFUSED[name]}")


def _state_layout(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first, which flash-linear-attention also takes by its former name, but not by both."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(
            "efla.ops takes no transpose_state_layout beside state_v_first, its new name; pass state_v_first alone"
        )
    return transpose_state_layout


def _gate(g: Tensor | None, log_rate: Tensor | None, bias: Tensor | None) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), in float32 or wider."""
    if g is None or log_rate is None:
        raise ValueError("use_gate_in_kernel=True needs g, before its activation, and A_log")
    wide = torch.promote_types(g.dtype, torch.float32)
    raw = g.to(wide) if bias is None else g.to(wide) + bias.to(wide)
    return -log_rate.to(wide).exp() * functional.softplus(raw)


def _beta(beta: Tensor | None, is_raw: bool, allow_neg_eigval: bool) -> Any:
    """sigmoid(beta) of a raw beta, twice that with ``allow_neg_eigval``; any other as it is."""
    if allow_neg_eigval and not is_raw:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; otherwise pass 2 * beta")
    if not is_raw or beta is None:
        return beta
    beta = beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid()
    return 2 * beta if allow_neg_eigval else beta


def _run(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    *,
    state_v_first: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
) -> Result:
    dtype = reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype))
    if initial_state is not None:
        initial_state = initial_state.to(torch.promote_types(initial_state.dtype, torch.float32))
        initial_state = initial_state.transpose(2, 3) if state_v_first else initial_state
    o, state = linear_attention(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        v.new_ones(v.shape[:3]) if beta is None else beta,
        g,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        backend=backend,
    )
    if state is not None and state_v_first:
        state = state.transpose(2, 3).contiguous()
    return o.to(v.dtype), state


def _named(name: str, function: Callable[..., Result], doc: str) -> Callable[..., Result]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


_DELTA = "The delta rule: S_t = (I - beta k k^T) S_{t-1} + beta k v^T."
_EFLA = "The exact flow of the delta rule: beta replaced by (1 - exp(-beta k.k)) / k.k."
_GATED_DELTA = "The gated delta rule: S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T."
_GATED_EFLA = "The exact flow of the gated delta rule (rule ``gated_efla``)."

chunk_delta_rule = _named("chunk_delta_rule", _chunk("delta"), _DELTA)
chunk_efla = _named("chunk_efla", _chunk("efla"), _EFLA)
fused_recurrent_delta_rule = _named("fused_recurrent_delta_rule", _fused_recurrent("delta"), _DELTA)
fused_recurrent_efla = _named("fused_recurrent_efla", _fused_recurrent("efla"), _EFLA)
chunk_gated_delta_rule = _named("chunk_gated_delta_rule", _chunk_gated("gated_delta"), _GATED_DELTA)
chunk_gated_efla = _named("chunk_gated_efla", _chunk_gated("gated_efla"), _GATED_EFLA)
fused_recurrent_gated_delta_rule = _named(
    "fused_recurrent_gated_delta_rule", _fused_recurrent_gated("gated_delta", "delta"), _GATED_DELTA
)
fused_recurrent_gated_efla = _named(
    "fused_recurrent_gated_efla", _fused_recurrent_gated("gated_efla", "efla"), _GATED_EFLA
)
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
