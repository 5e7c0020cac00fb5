"""Sequence parallelism: each rank holds a part of every row, and ranks exchange their memory updates as affine maps.

Over the tokens of a rank the memory is an affine function of the incoming state, S_out = A S_in + B. Ranks compute (A, B)
in parallel, all-gather them, and compose the maps of earlier ranks:

    S_in(0) = 0,      S_in(r + 1) = A(r) S_in(r) + B(r)

Gradients flow in the other direction. With d(r) the gradient of S_in(r) from rank r's own tokens,

    g(r) = d(r) + A(r)^T g(r + 1),      dB(r) = g(r + 1),      dA(r) = g(r + 1) S_in(r)^T

A causal convolution needs the last tokens of the previous rank. Outputs and gradients equal those of one rank.

Shapes: B batch, T tokens of this rank, H heads, K and V widths, W kernel width, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import efla.scans.api as scans
from efla import rules
from efla.layers import LinearAttention, Mamba2, ShortConvolution, SoftmaxAttention
from efla.scans.keys import l2_normalize, squared_norm
from efla.scans.request import compute_dtype


class SequenceGroup:
    """The ``size`` ranks that share each row, in the order of its parts; ``rank`` is this process's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.active = True

    @classmethod
    def create(cls, size: int) -> SequenceGroup:
        """Split all ranks into groups of ``size`` neighbours, which divides their number; every rank must call this."""
        # Separate groups, even if there is only one, because gradients are exchanged on the default group.
        starts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(list(range(first, first + size))) for first in starts]
        return cls(cast(dist.ProcessGroup, groups[dist.get_rank() // size]))

    def part(self, rows: Tensor) -> Tensor:
        """This rank's part [B, T] of rows [B, R * T]."""
        if rows.shape[1] % self.size:
            raise ValueError(
                f"rows of {rows.shape[1]} tokens do not divide over {self.size} ranks; choose a length that is a multiple"
            )
        return rows.chunk(self.size, dim=1)[self.rank]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which every rank processes whole sequences on its own."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def halo(self, x: Tensor, width: int) -> Tensor:
        """The last ``width`` tokens [B, D, width] of the previous rank, from x [B, T, D]; zeros on the first rank."""
        if x.shape[1] < width:
            raise ValueError(
                f"each rank needs at least the {width} tokens that a convolution looks back, got {x.shape[1]}; "
                "use fewer ranks or longer rows"
            )
        tail = x[:, x.shape[1] - width :].transpose(1, 2)
        return cast(Tensor, _FromPrevious.apply(tail, self))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        log_gate: Tensor | None,
        *,
        rule: str | rules.UpdateRule,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        qk_l2norm: bool | str = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """:func:`efla.linear_attention` over whole rows; q, k, v, beta and log_gate are this rank's part of them."""
        if initial_state is not None or output_final_state or cu_seqlens is not None:
            raise ValueError(
                "sequence parallelism supports neither initial and final states nor packed sequences (cu_seqlens)"
            )
        rule = rules.get(rule)
        arguments: dict[str, Any] = {"rule": rule, "qk_l2norm": qk_l2norm, **options}
        transition, addition = _affine_map(q, k, v, beta, log_gate, arguments)
        incoming = cast(Tensor, _Incoming.apply(transition, addition, self))
        o, _ = scans.linear_attention(q, k, v, beta, log_gate, initial_state=incoming, **arguments)
        return o, None


def split_sequence(model: nn.Module, group: SequenceGroup) -> None:
    """Make the model's recurrent layers process their part of each row; softmax attention is not supported."""
    for name, module in model.named_modules():
        if isinstance(module, SoftmaxAttention):
            raise ValueError(
                f"{name} is softmax attention, which has no recurrent state: sequence parallelism needs a model with "
                "recurrent mixers only"
            )
        if isinstance(module, (LinearAttention, Mamba2, ShortConvolution)):
            module.sequence = group


def _affine_map(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_gate: Tensor | None, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(A, B) of S_out = A S_in + B over these tokens; A is [B, H, K, K], or [B, H, 1, 1] for rules without erase."""
    rule: rules.UpdateRule = arguments["rule"]
    dtype = compute_dtype(q, k, v)
    B, T, H, V = v.shape
    K = k.shape[3]
    if not rule.has_erase:
        _, addition = scans.linear_attention(q, k, v, beta, log_gate, output_final_state=True, **arguments)
        if not rule.has_decay:
            return v.new_ones(B, H, 1, 1, dtype=dtype), cast(Tensor, addition)
        keys = l2_normalize(k.to(dtype)) if arguments["qk_l2norm"] in (True, "k") else k.to(dtype)
        lam = squared_norm(keys).repeat_interleave(H // k.shape[2], 2)
        wide = [None if x is None else x.to(lam.dtype) for x in (beta, log_gate)]
        log_decay = rule.coefficients(wide[0], lam, wide[1]).log_decay.sum(1)
        return log_decay.exp().to(dtype)[..., None, None], cast(Tensor, addition)
    # A is the final state for the identity as initial state and zero values: K more columns of v.
    values = torch.cat([v, v.new_zeros(B, T, H, K)], dim=-1)
    start = torch.cat([v.new_zeros(K, V, dtype=dtype), torch.eye(K, dtype=dtype, device=v.device)], dim=-1)
    start = start.expand(B, H, K, V + K).contiguous()
    _, final = scans.linear_attention(
        q, k, values, beta, log_gate, initial_state=start, output_final_state=True, **arguments
    )
    addition, transition = cast(Tensor, final).split([V, K], dim=-1)
    return transition, addition


def _apply(transition: Tensor, state: Tensor) -> Tensor:
    return transition @ state if transition.shape[-1] > 1 else transition * state


def _gather(x: Tensor, group: SequenceGroup) -> list[Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(parts, x, group=group.group)
    return parts


class _Incoming(torch.autograd.Function):
    """The state [B, H, K, V] before this rank's tokens, from the affine maps of all ranks."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, addition: Tensor, group: SequenceGroup) -> Tensor:
        transitions, additions = _gather(transition, group), _gather(addition, group)
        state = torch.zeros_like(addition)
        for r in range(group.rank):
            state = _apply(transitions[r], state) + additions[r]
        ctx.group = group
        ctx.is_scalar = transition.shape[-1] == 1
        ctx.save_for_backward(state, *transitions[group.rank + 1 :])
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        group: SequenceGroup = ctx.group
        state, *later = ctx.saved_tensors
        grads = _gather(grad, group)
        total = torch.zeros_like(grad)  # g(r + 1), zero after the last rank
        for r in range(group.size - 1, group.rank, -1):
            transition = later[r - group.rank - 1]
            total = grads[r] + _apply(transition.transpose(-1, -2), total)
        if ctx.is_scalar:
            grad_transition = (total * state).sum((-1, -2), keepdim=True)
        else:
            grad_transition = total @ state.transpose(-1, -2)
        return grad_transition, total, None


class _FromPrevious(torch.autograd.Function):
    """The tensor of the previous rank; zeros on the first rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        parts = _gather(x, group)
        return parts[group.rank - 1] if group.rank else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group: SequenceGroup = ctx.group
        parts = _gather(grad, group)
        return (parts[group.rank + 1] if group.rank + 1 < group.size else torch.zeros_like(grad)), None
