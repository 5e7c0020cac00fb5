"""The exact flows: EFLA and the two ways to gate it.

Their one integral is in :mod:`efla.phi`. The backend ``native`` computes the same formulas and their gradients in C++, fused
with the scan: ``exact_erase`` and ``gated_write`` in csrc/kernels/rules.h.
"""

import math

import torch
from torch import Tensor

from efla.phi import expm1, flow_integral
from efla.rules.base import FlowRates, StepCoefficients, UpdateRule, gated_flow, without_decay


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
        return without_decay(flow_integral(beta, lam))


_LARGEST_RATE = 1e30


class GatedExactFlow(UpdateRule):
    """Gated EFLA, the exact flow of the gated delta rule read as an Euler step (paper: appendix efla_gated).

    dS/dtau = -((1 - a) I + a beta k k^T) S + beta k v^T over the unit interval, so that

        log_decay = -(1 - a),  erase = a beta phi1(a beta lam),  write = beta phi1((1 - a) + a beta lam).

    The decay never falls below exp(-1): this rule cannot clear its memory in one token; ``gated_efla_log`` can.
    """

    name = "gated_efla"
    title = "Gated EFLA"
    order = math.inf
    contractive = True
    needs_gate = True

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None and log_gate is not None
        gate = log_gate.exp()
        log_decay = expm1(log_gate)
        return StepCoefficients(
            log_decay=log_decay,
            erase=flow_integral(gate * beta, lam),
            write=flow_integral(beta, gate * lam, offset=-log_decay),
        )

    def flow(self, beta: Tensor, log_gate: Tensor | None = None) -> FlowRates:
        return gated_flow(beta, torch.zeros_like(beta) if log_gate is None else log_gate)


class GatedExactFlowLog(UpdateRule):
    """Exact flow whose decay is exactly the gate: dS/dtau = (log a I - beta k k^T) S + beta k v^T.

    log_decay = log a,  erase = beta phi1(beta lam),  write = beta phi1(-log a + beta lam).
    """

    name = "gated_efla_log"
    title = "exact flow whose decay is exactly the gate"
    order = math.inf
    contractive = True
    needs_gate = True

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None and log_gate is not None
        return StepCoefficients(
            log_decay=log_gate,
            erase=flow_integral(beta, lam),
            # A gate of exactly 0 is an infinite rate, and the quotient of two infinite rates is NaN.
            write=flow_integral(beta, lam, offset=(-log_gate).clamp(max=_LARGEST_RATE)),
        )

    def flow(self, beta: Tensor, log_gate: Tensor | None = None) -> FlowRates:
        decay = torch.zeros_like(beta) if log_gate is None else -log_gate
        return FlowRates(decay=decay, erase=beta, write=beta)
