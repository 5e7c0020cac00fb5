"""Inputs that break naive code: finite, and equal to float64 within the budget, gradients too."""

from __future__ import annotations

import pytest
import torch

import efla
from efla.testing import KINDS, assert_close, cotangents, expect, make_inputs, oracle, run
from tests.scans.cases import CONTENDERS, CONTRACTIVE, RULES, assert_all_match, contender

# With these keys an expansive rule overflows in exact arithmetic too, after a few tokens.
STIFF = {"mixed_norms", "huge_keys", "stiff"}
COMBINATIONS = [(kind, rule) for kind in KINDS for rule in RULES if kind not in STIFF or rule in CONTRACTIVE]


@pytest.mark.parametrize(("kind", "rule"), COMBINATIONS)
def test_hard_inputs_match_the_oracle(kind, rule):
    assert_all_match(make_inputs(rule, kind=kind, length=100, initial_state=True))


@pytest.mark.parametrize("rule", ["efla", "implicit_euler", "gated_efla", "gated_efla_log"])
@pytest.mark.parametrize("kind", ["mixed_norms", "huge_keys", "tiny_keys", "stiff"])
def test_gradients_of_keys_are_right_token_by_token_over_36_orders_of_magnitude(rule, kind):
    inputs = make_inputs(rule, kind=kind, length=100, key_heads=1, value_heads=1)
    expected = oracle(inputs)["grad_k"]
    for name in CONTENDERS:
        with contender(name) as backend:
            got = run(inputs, backend)["grad_k"].double()
        error = (got - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(error.max()) <= 2e-4, f"{name}, {inputs}"


@pytest.mark.parametrize("rule", ["efla", "implicit_euler", "crank_nicolson", "gated_efla", "gated_efla_log"])
def test_beta_of_1e4_on_keys_of_norm_1e18_is_one_over_lam(backend, rule):
    """beta * lam = 1e40 overflows float32; the step must still replace what the key stores, not ignore it."""
    k = torch.zeros(1, 1, 1, 4)
    k[..., 0] = 1e18
    v = torch.tensor([[[[2.0, -3.0]]]])
    gate = torch.zeros(1, 1, 1) if efla.rules.get(rule).needs_gate else None
    state = torch.full((1, 1, 4, 2), 1e-18)
    o, _ = efla.linear_attention(
        k, k, v, torch.full((1, 1, 1), 1e4), gate, rule=rule, initial_state=state, scale=1.0, backend=backend
    )
    # Crank-Nicolson reflects what was stored: v + (v - old) = 2 v - 1; the others forget it.
    expected = 2 * v - 1 if rule == "crank_nicolson" else v
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", ["ssd", "gated_delta", "gated_efla", "gated_efla_log"])
def test_a_gate_of_exactly_zero_forgets_everything(backend, rule):
    inputs = make_inputs(rule, length=40, initial_state=True)
    inputs.log_gate[:, 20] = -torch.inf
    o, state = inputs.call(backend)
    expected_o, expected_state = inputs.double().call("reference")
    torch.testing.assert_close(o.double(), expected_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["ssd", "gated_delta", "gated_efla", "gated_efla_log"])
@pytest.mark.parametrize("kind", ["normal", "closed_gate", "strong_gate", "tiny_keys"])
def test_gradients_of_gates_are_right_token_by_token(rule, kind):
    inputs = make_inputs(rule, kind=kind, length=100, key_heads=1, value_heads=1)
    expected = oracle(inputs)["grad_log_gate"]
    for name in CONTENDERS:
        with contender(name) as backend:
            got = run(inputs, backend)["grad_log_gate"].double()
        error = (got - expected).abs() / expected.abs().clamp(min=torch.finfo(torch.float32).tiny)
        assert float(error.max()) <= 2e-4, f"{name}, {inputs}"


@pytest.mark.parametrize("rule", ["ssd", "gated_delta", "gated_efla", "gated_efla_log"])
@pytest.mark.parametrize("kind", ["normal", "stiff", "tiny_keys"])
def test_gradients_at_a_gate_of_exactly_zero_are_those_of_a_rate_of_1e30(rule, kind):
    if kind in STIFF and rule not in CONTRACTIVE:
        pytest.skip("overflows in exact arithmetic")
    options = dict(kind=kind, length=40, batch=1, initial_state=True)
    inputs, near = make_inputs(rule, **options), make_inputs(rule, **options)
    inputs.log_gate[:, ::7], near.log_gate[:, ::7] = -torch.inf, -1e30
    expected = expect(near)
    for name in [*CONTENDERS, "reference"]:
        with contender(name) as backend:
            assert_close(run(inputs, backend), expected.truth, expected.honest)


NARROW = [(kind, rule) for kind, rule in COMBINATIONS if kind not in ("zero_keys", "open_gate", "nearly_open_gate")]


@pytest.mark.parametrize(("kind", "rule"), NARROW)
@pytest.mark.parametrize("key_dim", [1, 2, 4, 8])
def test_narrow_heads_match_the_oracle(kind, rule, key_dim):
    """As :func:`test_hard_inputs_match_the_oracle`, measured against the larger of a result and of what went into it.

    A few stiff tokens overwrite all that a narrow head holds. What is left, 1e-18 for keys of norm 1e18, is a difference of
    numbers as large as the state before, and no float32 run knows it better than by that state's rounding.
    """
    inputs = make_inputs(
        rule, kind=kind, batch=1, length=40, key_heads=1, key_dim=key_dim, value_dim=4, initial_state=True, seed=key_dim
    )
    expected = expect(inputs)
    state, q = (float(x.abs().max()) for x in (inputs.initial_state, inputs.q))
    d_o, d_state = (float(x.abs().max()) for x in cotangents(expected.truth["o"], expected.truth["final_state"]))
    adjoint = max(d_state, q * d_o * key_dim**-0.5)
    before = {"final_state": state, "o": state * q, "grad_q": state * d_o, "grad_initial_state": adjoint}
    for name in CONTENDERS:
        with contender(name) as backend:
            got = run(inputs, backend)
        for what, truth in expected.truth.items():
            assert got[what].isfinite().all(), f"{name}, {inputs}: {what}"
            if kind in STIFF and what not in before:
                continue
            size = max(float(truth.abs().max()), before.get(what, 0.0))
            error, honest = (float((x[what].double() - truth).abs().max()) for x in (got, expected.honest))
            budget = 2 * honest + 16 * torch.finfo(torch.float32).eps * size
            assert error <= budget, f"{name}, {inputs}: {what} is off by {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("what", ["q", "k", "v", "beta", "log_gate"])
@pytest.mark.parametrize("rule", ["gated_efla", "gated_delta", "ssd"])
def test_a_token_that_is_not_finite_spoils_only_what_follows_it(backend, rule, what, grad):
    inputs = make_inputs(rule, length=100)
    with torch.set_grad_enabled(grad), efla.validation("off"):
        clean, _ = inputs.call(backend)
        for place, value in ((40, torch.nan), (97, torch.inf if what in "kv" else torch.nan)):
            inputs.tensors()[what][0, place] = value
            o, state = inputs.call(backend)
            first = 40 if what != "q" else min(40, place)
            assert torch.equal(o[0, :first], clean[0, :first])
            assert torch.equal(o[1], clean[1])
            assert torch.isnan(o[0, 40]).all()
            assert torch.isfinite(state[1]).all()


def test_a_memory_that_overflows_spoils_only_what_follows(backend):
    inputs = make_inputs("delta", length=100, batch=1)
    clean, _ = inputs.call(backend)
    inputs.k[:, 50:53] = 1e18
    o, _ = inputs.call(backend)
    assert not torch.isfinite(o[:, 60:]).any()
    assert torch.equal(o[:, :50], clean[:, :50])


def test_nan_stays_in_its_own_sequence(backend):
    inputs = make_inputs("gated_efla", packed=[30, 70, 20], initial_state=True)
    clean_o, clean_state = inputs.call(backend)
    inputs.k[:, 40] = torch.nan
    o, state = inputs.call(backend)
    others = torch.cat([torch.arange(30), torch.arange(100, 120)])
    assert torch.isnan(o[:, 45]).all()
    torch.testing.assert_close(o[:, others], clean_o[:, others], rtol=0, atol=0)
    torch.testing.assert_close(state[[0, 2]], clean_state[[0, 2]], rtol=0, atol=0)
