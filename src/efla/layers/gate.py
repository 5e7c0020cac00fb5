"""The forget gate's parameterisation, shared by the gated rules and Mamba-2."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

GATES = ("mamba", "logsigmoid")


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
