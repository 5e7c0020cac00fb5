"""The fla backend in Triton's interpreter equals the float64 oracle: outputs, final state and all gradients, every rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import efla
from efla.bench.gpu.conformance import check_case
from efla.scans.backends.fla import operations
from efla.testing import KINDS, assert_close, deviation, low_precision_reference, make_inputs, oracle, run
from tests.bench.gpu import interpreter
from tests.scans.cases import CONTRACTIVE, RULES, SHAPES

REASON = interpreter.reason_to_skip()
pytestmark = [pytest.mark.gpu_sim, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
if REASON is None:
    interpreter.install()

# With these keys an expansive rule overflows in exact arithmetic too, after a few tokens.
STIFF = {"mixed_norms", "huge_keys", "stiff"}
# One rule for each operation and each way to feed it.
REPRESENTATIVES = ["linear", "ssd", "efla", "gated_delta", "gated_efla"]


def check(inputs, **options):
    problems = {name: str(found) for name, found in check_case(inputs, **options).items() if not found.is_within}
    assert not problems


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rule_and_shape_matches_the_oracle(rule, shape):
    check(make_inputs(rule, **{"batch": 1, **SHAPES[shape]}))


@pytest.mark.parametrize(("kind", "rule"), [(k, r) for k in KINDS for r in RULES if k not in STIFF or r in CONTRACTIVE])
def test_hard_inputs_match_the_oracle(kind, rule):
    inputs = make_inputs(rule, kind=kind, batch=1, length=100, initial_state=True)
    truth, found = oracle(inputs), run(inputs, "fla")
    honest = [run(inputs, low_precision_reference), _run_inverting(inputs)]
    if kind == "strong_gate" and "grad_log_gate" in truth:
        # fla forms it as q . dq - k . dk, so it is right relative to these, which a closed gate hardly changes.
        terms = _through_log_decay(inputs, (inputs.q.double() * truth["grad_q"]).sum(-1))
        for results in (truth, found, *honest):
            results["grad_log_gate"] = results["grad_log_gate"].double() + terms
    problems = {}
    for name, exact in truth.items():
        error, budget, not_finite = max(
            (deviation(found[name], exact, plain[name], precision=torch.float32) for plain in honest),
            key=lambda one: one.budget,
        )
        if not_finite or error > budget:
            problems[name] = f"error {error:.2e}, budget {budget:.2e}, {not_finite} not finite"
    assert not problems


def _run_inverting(inputs):
    """The chunk form with M^-1 as a matrix in float32, as kernels on matrix units have it: it rounds more than a solve."""

    def inverse(m):
        half = m.shape[-1] // 2
        if not half:
            return torch.ones_like(m)
        first, last = slice(half), slice(half, None)
        result = torch.zeros_like(m)
        result[..., first, first], result[..., last, last] = inverse(m[..., first, first]), inverse(m[..., last, last])
        result[..., last, first] = -result[..., last, last] @ m[..., last, first] @ result[..., first, first]
        return result

    def solve(m, right, *, upper, unitriangular):
        return (inverse(m.mT).mT if upper else inverse(m)) @ right

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "solve_triangular", solve)
        return run(inputs, "chunked")


def _through_log_decay(inputs, x):
    """x [B, T, H], a gradient of log_decay, as one of log_gate."""
    lam = (inputs.k.double() ** 2).sum(-1)
    beta = None if inputs.beta is None else inputs.beta.double()
    log_gate = inputs.log_gate.double().requires_grad_()
    log_decay = efla.rules.get(inputs.rule).coefficients(beta, lam, log_gate).log_decay
    return torch.autograd.grad(log_decay, log_gate, x)[0]


@pytest.mark.parametrize("rule", REPRESENTATIVES)
@pytest.mark.parametrize("shape", ["chunk_and_one", "packed", "l2_norm", "grouped_heads"])
def test_half_precision_is_as_good_as_its_operands(rule, shape):
    check(make_inputs(rule, dtype=torch.float16, **{"batch": 1, **SHAPES[shape]}))


@pytest.mark.parametrize("rule", ["efla", "gated_delta", "gated_efla"])
@pytest.mark.parametrize("shape", ["initial_state", "packed", "grouped_heads"])
def test_float32_without_tf32_takes_the_operation_that_solves_in_float32(rule, shape, monkeypatch):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    inputs = make_inputs(rule, **{"batch": 1, **SHAPES[shape]})
    with _recorded_operations() as names:
        check(inputs)
    assert names == ["chunk_comba"]


@pytest.mark.parametrize("rule", REPRESENTATIVES)
@pytest.mark.parametrize("shape", ["one_token", "initial_state", "packed_with_state_and_empty", "grouped_heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decoding_takes_recurrent_kernels_that_work_in_float32(rule, shape, dtype):
    inputs = make_inputs(rule, dtype=dtype, **{**SHAPES[shape], "length": 7})
    with _recorded_operations() as names, torch.no_grad():
        actual = run(inputs, "fla", gradients=False)
    assert [name.startswith("fused_recurrent") for name in names] == [True]
    honest = run(inputs, "reference", gradients=False)  # float32 inside, whatever the inputs are
    assert_close(actual, oracle(inputs, gradients=False), honest)


@pytest.mark.parametrize("rule", ["ssd", "gated_delta", "gated_efla_log"])
@pytest.mark.parametrize("length", [7, 80])
def test_a_gate_of_exactly_zero_forgets_everything(rule, length):
    inputs = make_inputs(rule, batch=1, length=length, initial_state=True)
    inputs.log_gate[:, length // 2] = -torch.inf
    with torch.no_grad():
        actual = run(inputs, "fla", gradients=False)
    expected = run(inputs.double(), "reference", gradients=False)
    for name in expected:
        torch.testing.assert_close(actual[name].double(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["efla", "implicit_euler", "gated_efla", "gated_efla_log"])
@pytest.mark.parametrize("kind", ["mixed_norms", "huge_keys", "tiny_keys", "stiff"])
def test_gradients_of_keys_are_right_token_by_token_over_36_orders_of_magnitude(rule, kind):
    inputs = make_inputs(rule, kind=kind, batch=1, length=100, key_heads=1, value_heads=1)
    got, expected = run(inputs, "fla")["grad_k"].double(), oracle(inputs)["grad_k"]
    error = (got - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(error.max()) <= 2e-4


@pytest.mark.parametrize("rule", ["efla", "implicit_euler", "crank_nicolson", "gated_efla", "gated_efla_log"])
@pytest.mark.parametrize("length", [1, 80])
def test_beta_of_1e4_on_keys_of_norm_1e18_is_one_over_lam(rule, length):
    k = torch.zeros(1, length, 1, 4)
    k[..., 0] = 1e18
    v = torch.tensor([2.0, -3.0]).expand(1, length, 1, 2)
    gate = torch.zeros(1, length, 1) if efla.rules.get(rule).needs_gate else None
    state = torch.full((1, 1, 4, 2), 1e-18)
    with torch.no_grad():
        o, _ = efla.linear_attention(
            k, k, v, torch.full((1, length, 1), 1e4), gate, rule=rule, initial_state=state, scale=1.0, backend="fla"
        )
    # Crank-Nicolson reflects what was stored: v + (v - old) = 2 v - 1; the others forget it.
    expected = 2 * v - 1 if rule == "crank_nicolson" else v
    torch.testing.assert_close(o[:, 0], expected[:, 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("recorded", [True, False], ids=["training", "inference"])
def test_nan_stays_in_its_own_sequence(recorded):
    clean = make_inputs("gated_efla", packed=[30, 70, 20], initial_state=True)
    poisoned = replace(clean, k=clean.k.clone())
    poisoned.k[:, 40] = torch.nan
    for inputs in (clean, poisoned):
        inputs.v.requires_grad_(recorded)
    (clean_o, clean_state), (o, state) = clean.call("fla"), poisoned.call("fla")
    others = torch.cat([torch.arange(30), torch.arange(100, 120)])
    assert torch.isnan(o[:, 45]).all()
    torch.testing.assert_close(o[:, others], clean_o[:, others], rtol=0, atol=0)
    torch.testing.assert_close(state[[0, 2]], clean_state[[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("log_gate", [-4.0, -9.0])
def test_gated_efla_has_the_right_gradients_where_erase_is_tiny(log_gate):
    """erase is about a times write: 0.02 and 1e-4. Both scalars' gradients count, and the rule's own inputs'."""
    inputs = make_inputs("gated_efla", batch=1, length=100, initial_state=True, dtype=torch.float16)
    inputs.log_gate.fill_(log_gate)
    check(inputs)
    error = _erase_gradient_error(inputs, _by_backend)
    assert error <= 4e-3
    # What the backend must not do, so that this test is known to see it: v write / erase through the gated delta rule.
    assert _erase_gradient_error(inputs, _by_division) > 10 * error


def _erase_gradient_error(inputs, function):
    lam = (inputs.k.double() ** 2).sum(-1)
    step = efla.rules.get("gated_efla").coefficients(inputs.beta.double(), lam, inputs.log_gate.double())
    log_decay, erase, write = (x.float() for x in step)
    cotangent = torch.randn(inputs.v.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def gradient(function, dtype, scalar):
        leaf = erase.to(scalar).requires_grad_()
        q, k, v = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
        o = function(q, k, v, log_decay.to(scalar), leaf, write.to(scalar))
        return torch.autograd.grad((o.double() * cotangent).sum(), leaf)[0].double()

    truth = gradient(_by_reference, torch.float64, torch.float64)
    return float((gradient(function, torch.float16, torch.float32) - truth).abs().max() / truth.abs().max())


def _by_reference(q, k, v, log_decay, erase, write):
    return efla.scan(q, k, v, log_decay, erase, write, backend="reference")[0]


def _by_backend(q, k, v, log_decay, erase, write):
    return efla.scan(q, k, v, log_decay, erase, write, backend="fla")[0]


def _by_division(q, k, v, log_decay, erase, write):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, (v * (write / erase)[..., None]).to(v.dtype), log_decay, erase)[0]


def test_an_independent_operation_gives_the_same():
    """Gated DeltaNet-2 with its channel-wise gates broadcast is another implementation of erase != write."""
    from fla.ops.gdn2 import chunk_gdn2

    inputs = make_inputs("gated_efla", batch=1, length=100)
    q, k, v = inputs.q, inputs.k, inputs.v
    lam = (k.double() ** 2).sum(-1)
    step = efla.rules.get("gated_efla").coefficients(inputs.beta.double(), lam, inputs.log_gate.double())
    leaves = [x.float().requires_grad_() for x in step]

    def by_gdn2(log_decay, erase, write):
        return chunk_gdn2(q, k, v, *(x[..., None].expand_as(v) for x in (log_decay, erase, write)))[0]

    def by_backend(*scalars):
        return _by_backend(q, k, v, *scalars)

    cotangent = torch.randn(v.shape)
    results = []
    for function in (by_gdn2, by_backend):
        o = function(*leaves)
        results.append([o, *torch.autograd.grad((o * cotangent).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", REPRESENTATIVES)
def test_compiled_as_one_graph_it_matches_the_oracle_too(rule):
    """Its backward pass runs the operation again, and its squared norms are torch's: not the path of eager mode."""
    inputs = make_inputs(rule, batch=1, length=70, initial_state=True, key_heads=1)
    check(inputs, backend=torch.compile(lambda inputs: inputs.call("fla"), fullgraph=True, backend="aot_eager"))


@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_a_sequence_split_anywhere_gives_the_same(rule):
    inputs = make_inputs(rule, batch=1, length=100, initial_state=True)
    with torch.no_grad():
        whole, final = inputs.call("fla")
        state, parts = inputs.initial_state, []
        for tokens in (slice(0, 70), slice(70, 99), slice(99, 100)):
            cut = {name: x[:, tokens] for name, x in inputs.tensors().items() if name != "initial_state"}
            o, state = replace(inputs, **cut, initial_state=state).call("fla")
            parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


def test_inputs_of_any_layout():
    inputs = make_inputs("gated_efla", batch=2, length=70)
    strided = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.tensors().items()}
    assert not any(x.is_contiguous() for x in strided.values())
    for actual, expected in zip(replace(inputs, **strided).call("fla"), inputs.call("fla"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_to_do_keeps_the_state_and_its_gradient(batch, length):
    inputs = make_inputs("gated_efla", batch=batch, length=length, initial_state=True)
    results = run(inputs, "fla")
    assert results["o"].shape == inputs.v.shape
    torch.testing.assert_close(results["final_state"], inputs.initial_state, rtol=0, atol=0)
    assert results["grad_initial_state"].shape == inputs.initial_state.shape
    assert bool(results["grad_initial_state"].any()) == (batch > 0)


def test_bfloat16_is_refused_where_the_interpreter_gets_it_wrong():
    with pytest.raises(efla.BackendUnavailable, match="bfloat16 arithmetic is wrong"):
        make_inputs("efla", dtype=torch.bfloat16).call("fla")


class _recorded_operations:  # noqa: N801
    """Lists the operations called inside, by name."""

    def __enter__(self):
        self.names, self.load = [], operations.Operation.load

        def load(operation):
            self.names.append(operation.name)
            return self.load(operation)

        operations.Operation.load = load
        return self.names

    def __exit__(self, *_):
        operations.Operation.load = self.load
