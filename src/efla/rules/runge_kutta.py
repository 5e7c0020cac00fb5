"""Other integrators of the delta flow: explicit and implicit Runge-Kutta methods."""

from torch import Tensor

from efla.phi import rational_step
from efla.rules.base import StepCoefficients, UpdateRule, without_decay


class Midpoint(UpdateRule):
    """Second-order Runge-Kutta step of the delta flow: erase = write = beta (1 - x/2), x = beta * lam."""

    name = "rk2"
    title = "midpoint"
    order = 2
    contractive = False
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return without_decay(beta * (1 - beta * lam / 2))


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
        return without_decay(beta * (1 - x / 2 * (1 - x / 3 * (1 - x / 4))))


class ImplicitEuler(UpdateRule):
    """Implicit Euler step of the delta flow (as in Longhorn): erase = write = beta / (1 + beta * lam)."""

    name = "implicit_euler"
    title = "implicit Euler, Longhorn-style"
    order = 1
    contractive = True
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return without_decay(rational_step(beta, lam))


class CrankNicolson(UpdateRule):
    """Trapezoid (Cayley) step of the delta flow: erase = write = beta / (1 + beta * lam / 2)."""

    name = "crank_nicolson"
    title = "trapezoid / Cayley"
    order = 2
    contractive = True
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return without_decay(rational_step(beta, lam / 2))
