from __future__ import annotations

from torch import Tensor

from efla.rules.base import StepCoefficients, UpdateRule, undecayed


class Midpoint(UpdateRule):
    """Second-order Runge-Kutta step of the delta flow: erase = write = beta (1 - x/2), x = beta * lam."""

    name = "rk2"
    title = "midpoint"
    order = 2
    contractive = False
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return undecayed(beta * (1 - beta * lam / 2))


class RungeKutta4(UpdateRule):
    """Classic Runge-Kutta step of the delta flow: erase = write = beta (1 - x/2 + x^2/6 - x^3/24), x = beta * lam."""

    name = "rk4"
    title = "classic Runge-Kutta"
    order = 4
    contractive = False
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        x = beta * lam
        return undecayed(beta * (1 - x / 2 * (1 - x / 3 * (1 - x / 4))))
