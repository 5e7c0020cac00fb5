"""RMSNorm: gain only, statistics in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from efla.native import rows


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis.

        y = gain * x / sqrt(mean(x^2) + eps)

    x, y: [..., size], any floating dtype; the statistics and the product are float32 or wider.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rows.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
