"""flash-linear-attention's function names, arguments and layout on top of :func:`efla.linear_attention`.

A user swaps ``from fla.ops.delta_rule import chunk_delta_rule`` for ``from efla.ops import chunk_delta_rule``.
q, k: [B, T, H, K]; v: [B, T, HV, V]; beta, g: [B, T, HV] with g the logarithm of the gate. ``chunk_`` and
``fused_recurrent_`` are the same function here: the backend decides how to run.
"""

from torch import Tensor

from efla.scans.api import linear_attention

__all__ = [
    "chunk_delta_rule",
    "chunk_efla",
    "chunk_gated_delta_rule",
    "chunk_gated_efla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_efla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_efla",
]


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule: S_t = (I - beta k k^T) S_{t-1} + beta k v^T."""
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _by_rule("delta", q, k, v, beta, None, *options)


def chunk_efla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The exact flow of the delta rule: beta replaced by (1 - exp(-beta k.k)) / k.k."""
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _by_rule("efla", q, k, v, beta, None, *options)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T."""
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _by_rule("gated_delta", q, k, v, beta, g, *options)


def chunk_gated_efla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The exact flow of the gated delta rule (rule ``gated_efla``)."""
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _by_rule("gated_efla", q, k, v, beta, g, *options)


def _by_rule(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    return linear_attention(
        q,
        k,
        v,
        beta,
        g,
        rule=rule,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


fused_recurrent_delta_rule = chunk_delta_rule
fused_recurrent_efla = chunk_efla
fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
fused_recurrent_gated_efla = chunk_gated_efla
