"""Rules that erase nothing: linear attention and state-space duality."""

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


class StateSpaceDual(UpdateRule):
    """Mamba-2, RetNet, simple GLA: the whole memory decays, S_t = a S_{t-1} + beta k v^T.

    Mamba-2 is beta = dt, log_gate = -dt A, k = B, q = C, v = x.
    """

    name = "ssd"
    title = "Mamba-2 / RetNet / simple GLA"
    order = None
    contractive = True
    needs_gate = True
    has_erase = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None and log_gate is not None
        return StepCoefficients(log_decay=log_gate, erase=torch.zeros_like(lam), write=beta)

    def flow(self, beta: Tensor, log_gate: Tensor | None = None) -> FlowRates:
        assert log_gate is not None
        return FlowRates(decay=-log_gate, erase=torch.zeros_like(beta), write=beta)
