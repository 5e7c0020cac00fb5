"""The Euler steps: DeltaNet and Gated DeltaNet."""

import torch
from torch import Tensor

from efla.rules.base import FlowRates, StepCoefficients, UpdateRule, gated_flow, without_decay


class Delta(UpdateRule):
    """DeltaNet, one explicit Euler step of the delta flow: erase = write = beta. Grows beyond beta * lam = 2."""

    name = "delta"
    title = "DeltaNet, explicit Euler"
    order = 1
    contractive = False
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return without_decay(beta)


class GatedDelta(UpdateRule):
    """Gated DeltaNet, an Euler step after a decay by the gate a: S_t = a (I - beta k k^T) S_{t-1} + beta k v^T."""

    name = "gated_delta"
    title = "Gated DeltaNet"
    order = 1
    contractive = False
    needs_gate = True

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None and log_gate is not None
        return StepCoefficients(log_decay=log_gate, erase=beta, write=beta)

    def flow(self, beta: Tensor, log_gate: Tensor | None = None) -> FlowRates:
        return gated_flow(beta, torch.zeros_like(beta) if log_gate is None else log_gate)
