"""Each rule against the differential equation it claims to solve, and against the properties it declares."""

from __future__ import annotations

import math

import pytest
import torch

import efla
from efla import rules
from efla.rules import UpdateRule

ALL = rules.names()
EXACT = [name for name in ALL if rules.get(name).order == math.inf]
GATED = [name for name in ALL if rules.get(name).needs_gate]
ORDERS = {"delta": 1, "rk2": 2, "rk4": 4, "implicit_euler": 1, "crank_nicolson": 2}


def scalars(rule: UpdateRule, beta: float, lam: float, log_gate: float = -0.4):
    def tensor(x: float) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64)

    gate = tensor(log_gate) if rule.needs_gate else None
    return rule.coefficients(tensor(beta) if rule.needs_beta else None, tensor(lam), gate)


def apply_step(rule: UpdateRule, state, k, v, beta: float, log_gate: float = -0.4):
    log_decay, erase, write = scalars(rule, beta, float(k @ k), log_gate)
    return log_decay.exp() * (state - erase * torch.outer(k, k @ state)) + write * torch.outer(k, v)


def true_flow(rule: UpdateRule, state, k, v, beta: float, log_gate: float = -0.4):
    """exp of the augmented generator [[-A, b], [0, 0]]: transition and input integral in one matrix exponential."""
    rates = rule.flow(torch.tensor(beta, dtype=torch.float64), torch.tensor(log_gate, dtype=torch.float64))
    size, width = state.shape
    generator = torch.zeros(size + width, size + width, dtype=torch.float64)
    generator[:size, :size] = -(rates.decay * torch.eye(size, dtype=torch.float64) + rates.erase * torch.outer(k, k))
    generator[:size, size:] = rates.write * torch.outer(k, v)
    flow = torch.linalg.matrix_exp(generator)
    return flow[:size, :size] @ state + flow[:size, size:]


def example(norm: float = 1.0):
    generator = torch.Generator().manual_seed(3)
    state, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in [(6, 5), (6,), (5,)])
    return state, norm * k / k.norm(), v


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("norm", [1e-3, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.9, 3.0])
@pytest.mark.parametrize("log_gate", [0.0, -1e-8, -0.4, -5.0])
def test_exact_rules_equal_the_matrix_exponential_of_their_flow(name, norm, beta, log_gate):
    rule = rules.get(name)
    state, k, v = example(norm)
    expected = true_flow(rule, state, k, v, beta, log_gate)
    got = apply_step(rule, state, k, v, beta, log_gate)
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-12


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_measured_order_of_convergence(name, order):
    rule = rules.get(name)
    assert rule.order == order
    state, k, v = example()
    expected = true_flow(rule, state, k, v, beta=1.0)
    errors = []
    for steps in (32, 64):
        now = state
        for _ in range(steps):
            now = apply_step(rule, now, k, v, 1.0 / steps)
        errors.append(float((now - expected).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("name", ALL)
def test_contractive_rules_never_expand_and_the_others_do(name):
    rule = rules.get(name)
    norms = []
    for stiffness in [0.0, 1e-6, 0.1, 1.0, 1.9, 2.1, 3.0, 10.0, 1e3, 1e6]:
        for log_gate in [0.0, -1e-8, -0.5, -80.0]:
            log_decay, erase, _ = scalars(rule, stiffness, 1.0, log_gate)
            along_key = abs(float(1 - erase)) * math.exp(float(log_decay))
            norms.append(max(along_key, math.exp(float(log_decay))))
    assert (max(norms) <= 1 + 1e-15) == rule.contractive


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("linear", "ssd")])
def test_small_stiffness_recovers_the_delta_rule(name):
    rule = rules.get(name)
    _, erase, write = scalars(rule, 1e-9, 0.7, log_gate=0.0)
    assert float(erase) == pytest.approx(1e-9, rel=1e-8)
    assert float(write) == pytest.approx(1e-9, rel=1e-8)
    _, erase, write = scalars(rule, 0.5, 0.0, log_gate=0.0)
    assert float(erase) == 0.5
    assert float(write) == 0.5


def test_efla_departs_from_delta_by_half_beta_squared_lam():
    beta, lam = 1e-3, 0.7
    _, erase, _ = scalars(rules.get("efla"), beta, lam)
    assert beta - float(erase) == pytest.approx(beta**2 * lam / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("gated", "plain"), [("gated_efla", "efla"), ("gated_efla_log", "efla"), ("gated_delta", "delta")]
)
def test_an_open_gate_gives_the_ungated_rule(gated, plain):
    for beta, lam in [(0.3, 0.5), (0.9, 4.0), (1e4, 1e3)]:
        got, expected = scalars(rules.get(gated), beta, lam, log_gate=0.0), scalars(rules.get(plain), beta, lam)
        torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


def test_gated_efla_cannot_forget_faster_than_one_over_e():
    log_decay, erase, write = scalars(rules.get("gated_efla"), 0.8, 1.0, log_gate=-80.0)
    assert float(log_decay) == pytest.approx(-1.0)
    assert float(erase) == pytest.approx(0.0, abs=1e-30)
    assert float(write) == pytest.approx(0.8 * (1 - math.exp(-1)))


def test_the_papers_literal_formula_agrees_where_it_is_valid():
    lam = torch.logspace(-8, 4, 200, dtype=torch.float64)
    for beta in (0.01, 0.5, 1.0):
        literal = -torch.expm1(-beta * lam) / lam.clamp(min=1e-12)
        erase = rules.get("efla").coefficients(torch.full_like(lam, beta), lam).erase
        torch.testing.assert_close(erase, literal, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_declared_absences_are_true(name):
    rule = rules.get(name)
    log_decay, erase, _ = scalars(rule, 0.7, 1.3)
    assert rule.has_decay == (float(log_decay) != 0)
    assert rule.has_erase == (float(erase) != 0)


@pytest.mark.parametrize("name", ALL)
def test_a_small_step_is_the_flow_times_its_length(name):
    """Every rule, of finite order or none, discretises the flow that it names: to first order in the step they agree."""
    rule = rules.get(name)
    beta, log_gate = (torch.tensor(1e-7 * x, dtype=torch.float64) for x in (0.7, -0.4))
    step = scalars(rule, float(beta), 1.3, float(log_gate))
    rates = rule.flow(beta, log_gate)
    expected = torch.stack([-rates.decay, rates.erase, rates.write])
    torch.testing.assert_close(torch.stack(step), expected, rtol=1e-6, atol=1e-20)
    if name not in ("linear", "ssd"):  # a gate that is not given is open
        open_gate = rule.flow(beta, torch.zeros_like(beta))
        torch.testing.assert_close(rule.flow(beta), open_gate, rtol=0, atol=0)
        assert float(open_gate.decay) == 0


def test_every_rule_of_the_design_is_there():
    assert rules.names()[:11] == [
        "linear", "ssd", "delta", "rk2", "rk4", "implicit_euler", "crank_nicolson", "efla",
        "gated_delta", "gated_efla", "gated_efla_log",
    ]  # fmt: skip


def test_an_unknown_rule_is_an_error_that_lists_the_near_ones():
    with pytest.raises(ValueError, match=r"unknown rule 'gated-elfa'; did you mean 'gated_efla'"):
        efla.rules.get("gated-elfa")


@pytest.mark.parametrize("taken", [{}, {"__qualname__": "Delta"}, {"__module__": "efla.rules.delta"}])
def test_a_name_cannot_be_taken_twice(taken):
    Impostor = type("Impostor", (type(rules.get("delta")),), taken)
    with pytest.raises(ValueError, match=r"'delta' is registered already \(Delta\(name='delta'\)\)"):
        rules.register(Impostor())
    assert type(rules.get("delta")).__name__ == "Delta"


def test_a_class_that_is_defined_again_in_the_same_place_replaces_its_rule():
    """As a notebook's cell does when it is run a second time."""
    first, second = (notebook_cell() for _ in range(2))
    assert type(first) is not type(second)
    try:
        assert rules.register(first) is first
        assert rules.register(second) is rules.get("from_a_notebook") is second
        assert rules.get(first) is first
    finally:
        rules._RULES.pop("from_a_notebook")


def notebook_cell() -> UpdateRule:
    class Mine(type(rules.get("delta"))):  # type: ignore[misc]
        name = "from_a_notebook"

    return Mine()
