from __future__ import annotations

import math

from torch import Tensor

from efla.phi import flow_integral
from efla.rules.base import StepCoefficients, UpdateRule, undecayed


class ExactFlow(UpdateRule):
    """EFLA, the exact solution of dS/dtau = -k k^T S + k v^T over a time beta (paper: eq:efla_final).

    erase = write = beta * phi1(beta * lam) = (1 - exp(-beta * lam)) / lam
    """

    name = "efla"
    title = "EFLA, exact flow"
    order = math.inf
    contractive = True
    has_decay = False

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        return undecayed(flow_integral(beta, lam))
