"""AdamW that decays matrices and leaves one-dimensional parameters alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: decayed (two or more dimensions: linear maps, embeddings, convolutions) and not.

    Undecayed are gains, biases, A_log, dt_bias and D, in every arm alike (spec lm.md 4).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW over :func:`parameter_groups`, its state present from the start; the rate is set at every step.

    The state is what torch would make at the first step, zeros: a checkpoint can be read into it before that.
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay), lr=0.0, betas=betas, eps=eps, fused=_can_fuse(model.parameters())
    )
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


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
