from __future__ import annotations

import torch
from torch import Tensor

from efla.rules.base import FlowRates, StepCoefficients, UpdateRule


class Linear(UpdateRule):
    """Linear attention: every association is added and none is erased, S_t = S_{t-1} + k v^T."""

    name = "linear"
    title = "linear attention"
    order = None
    contractive = True
    needs_beta = False
    has_erase = False
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        zero = torch.zeros_like(lam)
        return StepCoefficients(log_decay=zero, erase=zero, write=torch.ones_like(lam))

    def flow(self, beta: Tensor, log_gate: Tensor | None = None) -> FlowRates:
        zero = torch.zeros_like(beta)
        return FlowRates(decay=zero, erase=zero, write=torch.ones_like(beta))
