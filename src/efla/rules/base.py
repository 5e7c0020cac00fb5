"""What a rule is: a map from (beta, lam, log_gate) to the three scalars of one step.

    S_t = exp(log_decay) * (I - erase * k k^T) S_{t-1} + write * k v^T,       lam = k.k

Rules know nothing of chunks, devices or padding; scans know nothing of differential equations.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class StepCoefficients(NamedTuple):
    """The three scalars of one step, each of the shape of ``lam``."""

    log_decay: Tensor
    erase: Tensor
    write: Tensor


class FlowRates(NamedTuple):
    """The differential equation a rule discretises, over the unit interval:

    dS/dtau = -(decay I + erase k k^T) S + write k v^T
    """

    decay: Tensor
    erase: Tensor
    write: Tensor


class UpdateRule(ABC):
    """One way to turn a token into a memory update. Subclasses state their properties; the tests hold them to it."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What the rule is known as."""
    order: ClassVar[float | None]
    """Order of accuracy against :meth:`flow` (``math.inf`` if exact, ``None`` if it discretises no delta-rule flow)."""
    contractive: ClassVar[bool]
    """Whether the transition exp(log_decay) (I - erase k k^T) has norm <= 1 for every beta >= 0 and gate <= 1."""
    needs_beta: ClassVar[bool] = True
    needs_gate: ClassVar[bool] = False

    has_decay: ClassVar[bool] = True
    """Whether log_decay can differ from zero; scans skip the decay's work where it cannot."""
    has_erase: ClassVar[bool] = True
    """Whether erase can differ from zero; scans skip the triangular solve where it cannot."""

    @abstractmethod
    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        """The step's scalars from the writing strength, the key's squared norm and the logarithm of the gate."""

    def flow(self, beta: Tensor, log_gate: Tensor | None = None) -> FlowRates:
        """The differential equation this rule discretises; by default the delta rule's (paper: eq:general_solution_ode)."""
        return FlowRates(decay=torch.zeros_like(beta), erase=beta, write=beta)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"


def without_decay(erase: Tensor) -> StepCoefficients:
    """Coefficients of a rule that neither decays nor tells erasing from writing."""
    return StepCoefficients(log_decay=torch.zeros_like(erase), erase=erase, write=erase)


def gated_flow(beta: Tensor, log_gate: Tensor) -> FlowRates:
    """The flow behind Gated DeltaNet as the paper's appendix reads it: the gate's loss 1 - a is the decay rate."""
    gate = log_gate.exp()
    return FlowRates(decay=-torch.expm1(log_gate), erase=gate * beta, write=beta)
