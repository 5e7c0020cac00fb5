"""Update rules as ONNX graphs: the formulas of :mod:`efla.rules`, one function per rule.

A function takes a :class:`Step` and returns the names of (log_decay, erase, write); ``None`` stands for the constant of a rule
that has none: no decay (0), no erasing (0), a plain write (1). A new rule is one entry of ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from efla.models.onnx_graph import Graph


class Coefficients(NamedTuple):
    """Names of a step's scalars, each [B, T, H]; erase and write may be the same name."""

    log_decay: str | None = None
    erase: str | None = None
    write: str | None = None


@dataclass(frozen=True)
class Step:
    """What a rule's scalars are made from: the names of k [B, T, H, K], beta and log_gate [B, T, H]."""

    g: Graph
    k: str
    beta: str
    log_gate: str

    @cached_property
    def lam(self) -> str:
        """k.k, [B, T, H]."""
        return self.g.add("ReduceSumSquare", self.k, self.g.constant([-1]), keepdims=0)

    @cached_property
    def x(self) -> str:
        """beta * lam."""
        return self.mul(self.beta, self.lam)

    def mul(self, a: str, b: str | float) -> str:
        return self.g.add("Mul", a, b if isinstance(b, str) else self.g.constant(b))

    def add(self, a: str, b: str | float) -> str:
        return self.g.add("Add", a, b if isinstance(b, str) else self.g.constant(b))

    def one_minus(self, x: str) -> str:
        return self.g.add("Sub", self.g.constant(1.0), x)

    def phi1(self, x: str) -> str:
        """(1 - e^-x) / x for x >= 0, within a few roundings of float32.

        ONNX has no Expm1. Of u = e^-x as rounded, 1 - u and -log u have the same relative error, which cancels.
        """
        g = self.g
        u = g.add("Exp", g.add("Neg", x))
        one = g.constant(1.0)
        denominator = g.add("Where", g.add("Greater", x, one), x, g.add("Neg", g.add("Log", u)))
        return g.add("Where", g.add("Equal", u, one), one, g.add("Div", self.one_minus(u), denominator))


def _same(erase: str, log_decay: str | None = None) -> Coefficients:
    return Coefficients(log_decay, erase, erase)


def rk4(s: Step) -> Coefficients:
    series = s.one_minus(s.mul(s.x, 1 / 4))
    for factor in (1 / 3, 1 / 2):
        series = s.one_minus(s.mul(s.mul(s.x, factor), series))
    return _same(s.mul(s.beta, series))


def gated_efla(s: Step) -> Coefficients:
    rate = s.g.add("Neg", s.log_gate)
    loss = s.mul(rate, s.phi1(rate))  # 1 - a
    beta = s.mul(s.g.add("Exp", s.log_gate), s.beta)
    x = s.mul(beta, s.lam)
    return Coefficients(s.g.add("Neg", loss), s.mul(beta, s.phi1(x)), s.mul(s.beta, s.phi1(s.add(loss, x))))


def gated_efla_log(s: Step) -> Coefficients:
    total = s.g.add("Sub", s.x, s.log_gate)
    return Coefficients(s.log_gate, s.mul(s.beta, s.phi1(s.x)), s.mul(s.beta, s.phi1(total)))


RULES: dict[str, Callable[[Step], Coefficients]] = {
    "linear": lambda s: Coefficients(),
    "ssd": lambda s: Coefficients(s.log_gate, None, s.beta),
    "delta": lambda s: _same(s.beta),
    "rk2": lambda s: _same(s.mul(s.beta, s.one_minus(s.mul(s.x, 1 / 2)))),
    "rk4": rk4,
    "implicit_euler": lambda s: _same(s.g.add("Div", s.beta, s.add(s.x, 1.0))),
    "crank_nicolson": lambda s: _same(s.g.add("Div", s.beta, s.add(s.mul(s.x, 1 / 2), 1.0))),
    "efla": lambda s: _same(s.mul(s.beta, s.phi1(s.x))),
    "gated_delta": lambda s: _same(s.beta, s.log_gate),
    "gated_efla": gated_efla,
    "gated_efla_log": gated_efla_log,
}
