from __future__ import annotations

from torch import Tensor

from efla.rules.base import StepCoefficients, UpdateRule, undecayed


class Delta(UpdateRule):
    """DeltaNet, one explicit Euler step of the delta flow: erase = write = beta. Grows beyond beta * lam = 2."""

    name = "delta"
    title = "DeltaNet, explicit Euler"
    order = 1
    contractive = False
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return undecayed(beta)
