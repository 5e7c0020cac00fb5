"""What recurrent mixers share: the state they carry from one call to the next, and the parameters of the forget gate."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

GATES = ("mamba", "logsigmoid")


class MixerState(NamedTuple):
    """State of a mixer after some tokens; constant in their number.

    conv: [B, D, W - 1], the last inputs of the convolutions (``None`` without them); memory: [B, H, K, V], float32 or
    wider, S of the recurrence.
    """

    conv: Tensor | None
    memory: Tensor

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self if x is not None)


class SequenceNeighbours(Protocol):
    """Ranks that hold the other parts of each sequence; see :mod:`efla.train.sequence`."""

    active: bool

    def halo(self, x: Tensor, width: int) -> Tensor:
        """The last ``width`` tokens of the rank before, [B, D, width], from this rank's x [B, T, D]."""

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """:func:`efla.linear_attention` over the whole sequence, of which the arguments are this rank's part."""


def mamba_log_gate(x: Tensor, log_rate: Tensor, dt_bias: Tensor) -> Tensor:
    """log_gate = -exp(log_rate) * softplus(x + dt_bias), at most 0, in float32 or wider. x: [B, T, H]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return -log_rate.to(wide).exp() * functional.softplus(x.to(wide) + dt_bias.to(wide))


def draw_log_rate(num_heads: int, low: float = 0.0, high: float = 16.0, device: torch.device | None = None) -> Tensor:
    """log(A) with A uniform on (low, high), kept above 1e-4 so that the logarithm is finite. [H]"""
    return torch.empty(num_heads, device=device).uniform_(low, high).clamp_(min=1e-4).log_()


def draw_dt_bias(num_heads: int, low: float = 1e-3, high: float = 0.1, device: torch.device | None = None) -> Tensor:
    """softplus^-1(dt) = dt + log(-expm1(-dt)) with dt log-uniform on [low, high], at least 1e-4. [H]"""
    dt = torch.empty(num_heads, device=device).uniform_(math.log(low), math.log(high)).exp_().clamp_(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))
