"""The recurrence token by token with the roundings that no kernel on matrix units can avoid: their error budget.

Such a kernel multiplies operands of the inputs' dtype and adds up in float32, and a chunked one adds log_decay up over 64
tokens in float32. An error much beyond what these roundings cause here is a mistake; see :func:`efla.testing.assert_close`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from efla import rules
from efla.scans.keys import l2_normalize
from efla.scans.varlen import sequence_borders
from efla.testing import ScanInputs

CHUNK = 64
_LOG2_E = 1.4426950408889634  # the kernels turn the sums into logarithms of base 2, which rounds once more


def honest_call(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """(o, final_state), differentiable: o [B, T, Hv, V] in v's dtype, final_state [N, Hv, K, V] in float32.

    update_t = round(write v_t) - round(exp(log_decay) erase k_t)^T round(S_{t-1})
    S_t = exp(log_decay) S_{t-1} + k_t round(update_t)^T,     o_t = scale round(S_t)^T q_t
    """
    dtype, repeats = inputs.v.dtype, inputs.v.shape[2] // inputs.k.shape[2]
    q, k, v = inputs.q.float(), inputs.k.float(), inputs.v.float()
    if inputs.qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    lam = (k.double() ** 2).sum(-1).repeat_interleave(repeats, 2)
    beta, log_gate = (None if x is None else x.double() for x in (inputs.beta, inputs.log_gate))
    rule = rules.get(inputs.rule)
    log_decay, erase, write = (x.float() for x in rule.coefficients(beta, lam, log_gate))
    q, k = (_round(x, dtype).repeat_interleave(repeats, 2).flatten(0, 1) for x in (q, k))
    v, log_decay, erase, write = (x.flatten(0, 1) for x in (v, log_decay, erase, write))
    scale = inputs.k.shape[3] ** -0.5
    outputs, finals = [], []
    borders = sequence_borders(inputs.v.shape[0], inputs.v.shape[1], inputs.cu_seqlens)
    for n, (start, end) in enumerate(pairwise(borders)):
        tokens = slice(start, end)
        decay = _add_up(log_decay[tokens]).exp()[..., None]
        erased = _round(decay * erase[tokens][..., None] * k[tokens], dtype) if rule.has_erase else None
        written = _round(write[tokens][..., None] * v[tokens], dtype)
        if inputs.initial_state is None:
            state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], device=v.device)
        else:
            state = inputs.initial_state[n].float()
        for t in range(end - start):
            update = written[t]
            if erased is not None:
                update = update - torch.einsum("hkv,hk->hv", _round(state, dtype), erased[t])
            state = decay[t][..., None] * state + k[start + t][:, :, None] * _round(update, dtype)[:, None, :]
            outputs.append(scale * torch.einsum("hkv,hk->hv", _round(state, dtype), q[start + t]))
        finals.append(state)
    o = torch.stack(outputs) if outputs else v
    return o.view(inputs.v.shape).to(dtype), torch.stack(finals)


def _add_up(log_decay: Tensor) -> Tensor:
    """log_decay [T, H] as differences of float32 sums over chunks of 64 tokens; gradients pass through."""
    sums = [(_LOG2_E * chunk.detach().cumsum(0)).double() for chunk in log_decay.split(CHUNK)]
    steps = [s.diff(dim=0, prepend=torch.zeros_like(s[:1])) / _LOG2_E for s in sums]
    if not steps:
        return log_decay
    return log_decay + (torch.cat(steps) - log_decay.detach().double()).float()


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad.to(ctx.dtype).to(grad.dtype), None


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a matrix unit would take it, in both directions."""
    return x if dtype == x.dtype else _Rounding.apply(x, dtype)
