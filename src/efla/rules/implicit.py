from __future__ import annotations

from torch import Tensor

from efla.phi import rational_step
from efla.rules.base import StepCoefficients, UpdateRule, undecayed


class ImplicitEuler(UpdateRule):
    """Implicit Euler step of the delta flow (as in Longhorn): erase = write = beta / (1 + beta * lam)."""

    name = "implicit_euler"
    title = "implicit Euler, Longhorn-style"
    order = 1
    contractive = True
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return undecayed(rational_step(beta, lam))


class CrankNicolson(UpdateRule):
    """Trapezoid (Cayley) step of the delta flow: erase = write = beta / (1 + beta * lam / 2)."""

    name = "crank_nicolson"
    title = "trapezoid / Cayley"
    order = 2
    contractive = True
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return undecayed(rational_step(beta, lam / 2))
