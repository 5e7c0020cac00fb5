"""The exactness study: one cell per study and rule.

The true flow of a token is computed twice, by ``torch.linalg.matrix_exp`` and in closed form:

    dS/dtau = -(decay I + erase k k^T) S + write k v^T,        tau from 0 to 1
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from efla import rules
from efla.experiments.exactness.config import STUDIES, ExactnessConfig
from efla.experiments.experiment import Cell, Experiment, Report
from efla.rules import FlowRates, StepCoefficients
from efla.runs.records import Record

_FIT = (1e-3, 1e-1)
"""Range of step sizes for measuring an order: small enough for the leading term, large enough for float64."""
_FLOOR = 1e-13
"""Errors below this are rounding errors."""


class Exactness(Experiment[ExactnessConfig]):
    """Error of one step against the true flow, amplification per step, and the memory's norm, for every rule."""

    name = "exactness"
    title = "What an exact step buys"
    claim = "The closed form removes the Euler error, and never expands the memory"
    places: ClassVar[dict[str, str]] = {"a": "Section 3.2, closed form", "b": "Section 3.4, stable dynamics"}
    config_class = ExactnessConfig
    in_process = True

    def cells(self) -> list[Cell]:
        return [Cell({"study": study, "rule": rules.get(rule).name}) for study in STUDIES for rule in self.config.rules]

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        study = {"order": self._order, "stability": self._stability, "memory": self._memory}[cell.settings["study"]]
        return study(cell.settings["rule"])

    def _order(self, name: str) -> list[Record]:
        """Relative error ||S_rule - S_flow|| / ||S_flow|| of one step of size x = beta lam, and the order it implies.

        beta and log_gate shrink together with x. The local error of a method of order p is proportional to x^(p+1).
        The float64 oracle is the matrix exponential; the closed form is compared with it.
        """
        sizes = np.logspace(-4, 2, self.config.points).tolist()
        rule, errors, worst = rules.get(name), [], 0.0
        state, k, v = self._tokens()
        for x in sizes:
            beta = torch.full((self.config.draws,), x, dtype=torch.float64)  # lam = 1
            log_gate = beta * math.log(0.5) if rule.needs_gate else None
            rates = rule.flow(beta, log_gate)
            truth = by_matrix_exponential(rates, state, k, v)
            ours = step(rule.coefficients(beta, torch.ones_like(beta), log_gate), state, k, v)
            errors.append(float(_relative(ours, truth).median()))
            worst = max(worst, float(_relative(in_closed_form(rates, state, k, v), truth).max()))
        slope = _slope(sizes, errors)
        order = math.inf if slope is None else slope - 1
        row = {
            "title": rule.title,
            "x": sizes,
            "error": errors,
            "declared_order": None if rule.order is None else float(rule.order),
            "measured_order": order,
            "error_at_1": float(np.interp(0.0, np.log(sizes), errors)),
            "closed_form_against_matrix_exp": worst,
        }
        return [row | {"show": {"order": order}}]

    def _stability(self, name: str) -> list[Record]:
        """Amplification along the key, R(x) = exp(log_decay) (1 - erase lam) at x = beta lam, and where |R| exceeds 1."""
        sizes = np.concatenate([np.linspace(0, 8, 161), np.logspace(math.log10(8.05), 6, 120)]).tolist()
        factors = self._amplification(name, torch.tensor(sizes, dtype=torch.float64)).tolist()
        beyond = next((i for i, factor in enumerate(factors) if abs(factor) > 1), None)
        limit = math.inf if beyond is None else self._bisect(name, sizes[beyond - 1], sizes[beyond])
        rule = rules.get(name)
        row = {"title": rule.title, "contractive": rule.contractive, "x": sizes, "factor": factors}
        return [row | {"stability_limit": limit, "searched_to": sizes[-1], "show": {"stable to x =": limit}}]

    def _memory(self, name: str) -> list[Record]:
        """Norm of the memory over a sequence with a burst of energetic keys, and its largest value against the energy."""
        config = self.config
        start, end = config.burst_start, config.burst_start + config.burst_tokens
        energies = torch.ones(config.tokens, dtype=torch.float64)
        energies[start:end] = config.burst_energy
        trace = self._follow(name, energies[None], torch.float64)[0].median(0).values.tolist()
        scales = np.logspace(0, 2, 65)
        everywhere = torch.from_numpy(scales**2)[:, None].expand(-1, config.tokens)
        largest = self._follow(name, everywhere, torch.float32).nan_to_num(math.inf).amax(2)  # [scales, seeds]
        row = {
            "title": rules.get(name).title,
            "norm": trace,
            "norm_before_burst": trace[start - 1],
            "norm_after_burst": trace[end - 1],
            "scale": scales.tolist(),
            "largest_norm": largest.median(1).values.tolist(),
            "finite_share": largest.isfinite().double().mean(1).tolist(),
        }
        return [row | {"show": {"norm before": trace[start - 1], "after": trace[end - 1]}}]

    def _tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random (S, k, v) with unit keys: [draws, K, V], [draws, K], [draws, V]."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.config.draws, self.config.width)
        state = torch.randn(*shape, self.config.width, generator=generator, dtype=torch.float64)
        k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return state, k / k.norm(dim=1, keepdim=True), v

    def _amplification(self, name: str, x: Tensor) -> Tensor:
        rule = rules.get(name)
        log_gate = torch.full_like(x, math.log(self.config.gate)) if rule.needs_gate else None
        log_decay, erase, _ = rule.coefficients(x, torch.ones_like(x), log_gate)
        return log_decay.exp() * (1 - erase)

    def _bisect(self, name: str, low: float, high: float) -> float:
        for _ in range(60):
            middle = (low + high) / 2
            stable = abs(float(self._amplification(name, torch.tensor([middle], dtype=torch.float64)))) <= 1
            low, high = (middle, high) if stable else (low, middle)
        return low

    def _follow(self, name: str, energies: Tensor, dtype: torch.dtype) -> Tensor:
        """Frobenius norms of S_t under unit values and keys with k_t.k_t = energies[:, t].

        energies: [E, tokens]. Returns [E, seeds, tokens]. All energies share the directions of keys and values.
        """
        config, rule = self.config, rules.get(name)
        generator = torch.Generator().manual_seed(1)
        shape = (config.seeds, config.tokens, config.width)
        k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        k, v = k / k.norm(dim=-1, keepdim=True), v / v.norm(dim=-1, keepdim=True)
        E = len(energies)
        k = (k * energies[:, None, :, None].sqrt()).flatten(0, 1).to(dtype)  # [E * seeds, tokens, K]
        v = v.repeat(E, 1, 1).to(dtype)
        beta = torch.full((len(k),), config.beta, dtype=dtype)
        log_gate = torch.full_like(beta, math.log(config.gate)) if rule.needs_gate else None
        state = torch.zeros(len(k), config.width, config.width, dtype=dtype)
        norms = []
        for t in range(config.tokens):
            state = step(rule.coefficients(beta, k[:, t].square().sum(-1), log_gate), state, k[:, t], v[:, t])
            norms.append(state.flatten(1).double().norm(dim=1))
        return torch.stack(norms, dim=1).unflatten(0, (E, config.seeds))


def _relative(ours: Tensor, truth: Tensor) -> Tensor:
    return (ours - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)


def _slope(sizes: Sequence[float], errors: Sequence[float]) -> float | None:
    """Slope of the error in log-log coordinates over the small steps; ``None`` if there is only rounding error."""
    points = [(x, e) for x, e in zip(sizes, errors, strict=True) if _FIT[0] <= x <= _FIT[1] and e > _FLOOR]
    if len(points) < 3:
        return None
    # The half with the smaller steps: there the leading term dominates.
    x, y = np.log(points[: max(3, len(points) // 2)]).T
    return float(np.polyfit(x, y, 1)[0])


def by_matrix_exponential(rates: FlowRates, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The flow at tau = 1 from one exponential of the augmented system. This is the oracle.

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
    """The flow at tau = 1 by the rank-1 formula, with p = decay + erase lam:

        S(1) = e^-decay (S - (1 - e^{-erase lam}) k k^T S / lam) + write (1 - e^-p)/p k v^T

    Shapes as in :func:`by_matrix_exponential`; lam must be positive.
    """
    lam = k.square().sum(-1)
    p = rates.decay + rates.erase * lam
    erased = -torch.expm1(-rates.erase * lam) / lam
    written = rates.write * -torch.expm1(-p) / p
    return step(StepCoefficients(-rates.decay, erased, written), state, k, v)


def step(coefficients: StepCoefficients, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One step of a rule: exp(log_decay) (I - erase k k^T) S + write k v^T. Shapes as above.

    The reference backend multiplies in another order, which changes the last bits.
    """
    log_decay, erase, write = (x[:, None, None] for x in coefficients)
    kept = state - erase * k[:, :, None] * (k[:, None, :] @ state)
    return log_decay.exp() * kept + write * k[:, :, None] * v[:, None, :]
