"""AdamW with weight decay on matrices only, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: with decay (two or more dimensions: linear maps, embeddings, convolutions) and without.

    Without decay are gains, biases, A_log, dt_bias and D.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, *, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW over :func:`parameter_groups`; the rate is set at every step.

    The state is created here, with the zeros that torch would create at the first step, so that a checkpoint can be
    loaded into it.
    """
    import torch

    can_fuse = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in model.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay), lr=0.0, betas=betas, eps=eps, fused=can_fuse)
    for group in optimizer.param_groups:
        for p in group["params"]:
            device = p.device if group["fused"] else torch.device("cpu")
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear from ``start`` to ``peak`` over W warm-up steps, then a cosine to ``final`` at step N.

        t < W:   start + (peak - start) (t + 1) / W
        else:    final + (peak - final) (1 + cos(pi (t - W) / (N - W))) / 2

    t counts from 0, so the last step, t = N - 1, is just before ``final``.
    """

    steps: int
    warmup_steps: int
    peak: float
    start: float
    final: float

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be between 0 and steps, and steps at least 1; got {self.warmup_steps} of {self.steps}"
            )
        if not (min(self.start, self.final) >= 0 and max(self.start, self.final) <= self.peak):
            raise ValueError(
                f"rates must be >= 0 and the peak the largest; got start {self.start}, peak {self.peak}, final {self.final}"
            )

    @classmethod
    def tenth(cls, steps: int, peak: float) -> WarmupCosine:
        """The schedule of the CPU experiments: warm-up from peak / 10 over a tenth of the steps, cosine to peak / 10."""
        return cls(steps=steps, warmup_steps=steps // 10, peak=peak, start=peak / 10, final=peak / 10)

    def rate(self, step: int) -> float:
        """The rate of that step, 0-based."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step {step} is outside the schedule's 0 to {self.steps - 1}")
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.final + 0.5 * (self.peak - self.final) * (1 + math.cos(math.pi * share))
