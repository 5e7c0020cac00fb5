"""The true flow of a token, twice: by ``torch.linalg.matrix_exp``, and in closed form.

dS/dtau = -(decay I + erase k k^T) S + write k v^T,        tau from 0 to 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from efla.rules import FlowRates, StepCoefficients


def by_matrix_exponential(rates: FlowRates, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The flow's end point from one exponential of the augmented system; the oracle, it knows no formula of ours.

        exp [[-(decay I + erase k k^T), write k], [0, 0]] = [[A, b], [0, 1]],     S(1) = A S + b v^T

    rates: [N] each; state: [N, K, V]; k: [N, K]; v: [N, V]. Returns [N, K, V].
    """
    N, K = k.shape
    system = torch.zeros(N, K + 1, K + 1, dtype=k.dtype)
    system[:, :K, :K] = -rates.decay[:, None, None] * torch.eye(K, dtype=k.dtype)
    system[:, :K, :K] -= rates.erase[:, None, None] * k[:, :, None] * k[:, None, :]
    system[:, :K, K] = rates.write[:, None] * k
    flow = torch.linalg.matrix_exp(system)
    return flow[:, :K, :K] @ state + flow[:, :K, K, None] * v[:, None, :]


def in_closed_form(rates: FlowRates, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same end point by the rank-1 formula, with p = decay + erase lam:

        S(1) = e^-decay (S - (1 - e^{-erase lam}) k k^T S / lam) + write (1 - e^-p)/p k v^T

    Shapes as in :func:`by_matrix_exponential`; lam must be positive.
    """
    lam = k.square().sum(-1)
    p = rates.decay + rates.erase * lam
    erased = -torch.expm1(-rates.erase * lam) / lam
    written = rates.write * -torch.expm1(-p) / p
    kept = state - erased[:, None, None] * k[:, :, None] * (k[:, None, :] @ state)
    return (-rates.decay).exp()[:, None, None] * kept + written[:, None, None] * k[:, :, None] * v[:, None, :]


def step(coefficients: StepCoefficients, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One step of a rule: exp(log_decay) (I - erase k k^T) S + write k v^T. Shapes as above."""
    log_decay, erase, write = (x[:, None, None] for x in coefficients)
    kept = state - erase * k[:, :, None] * (k[:, None, :] @ state)
    return log_decay.exp() * kept + write * k[:, :, None] * v[:, None, :]
