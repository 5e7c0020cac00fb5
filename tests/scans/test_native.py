"""What only the C++ backend has: instruction sets, threads, decoding in place, and input that must not crash it."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import efla
from efla.rules import UpdateRule
from efla.rules.base import without_decay
from efla.rules.exact_flow import ExactFlow
from efla.scans.backends import native
from efla.scans.operators import scan_op
from efla.testing import assert_batch_invariant, make_inputs, run
from tests.fresh import run_fresh
from tests.scans.cases import RULES, assert_all_match, contender

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"backend 'native' {native.unavailable()}")

LEVELS = native.kernels.simd_levels() if native.unavailable() is None else []


def test_the_kernels_know_every_rule_of_the_package():
    assert list(native.kernels.rule_codes) == list(native.kernels.rule_facts) == RULES
    assert all(native.fuses(efla.rules.get(rule)) for rule in RULES)


@pytest.mark.parametrize("field", ["needs_beta", "needs_gate", "has_decay", "has_erase"])
def test_a_rule_that_disagrees_with_the_kernels_table_is_refused(field, monkeypatch):
    facts = native.kernels.rule_facts
    native.check_rules(facts)
    monkeypatch.setattr(ExactFlow, field, not getattr(ExactFlow, field))
    with pytest.raises(RuntimeError, match=rf"{field} = .*rule_table\.h"):
        native.check_rules(facts)


def test_the_import_compares_the_rules_with_the_kernels_table():
    lines = ["import importlib", "from efla.rules.delta import Delta", "from efla.scans.backends import native"]
    done = run_fresh("\n".join([*lines, "Delta.needs_gate = True", "importlib.reload(native)"]))
    assert done.returncode != 0
    assert "csrc/rule_table.h" in done.stderr


@pytest.mark.parametrize("rule", RULES)
def test_the_kernels_table_says_whether_a_rule_depends_on_the_key_norm(rule):
    beta, log_gate = torch.tensor([0.5]), torch.tensor([-0.3])
    steps = [efla.rules.get(rule).coefficients(beta, torch.tensor([lam]), log_gate) for lam in (0.5, 2.0)]
    assert native.kernels.rule_facts[rule]["uses_norm"] == any(
        not torch.equal(*pair) for pair in zip(*steps, strict=True)
    )


@pytest.mark.parametrize("width", [1, 16, 17, 64, 100, 128, 200, 256])
def test_widths_up_to_256(width):
    shape = {"batch": 1, "length": 70, "key_heads": 1, "value_heads": 1}
    assert_all_match(make_inputs("gated_efla", key_dim=width, value_dim=32, **shape))
    assert_all_match(make_inputs("efla", key_dim=32, value_dim=width, **shape))


@pytest.fixture(params=LEVELS)
def simd_level(request):
    with contender(f"native-{request.param}"):
        yield request.param


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("packed", [None, [1, 200, 30]], ids=["dense", "packed"])
def test_results_are_bit_identical_whatever_the_number_of_threads(heads, packed, simd_level):
    shape = {"key_heads": heads, "value_heads": 2 * heads, "key_dim": 64, "value_dim": 96}
    inputs = make_inputs("gated_efla", length=150, packed=packed, initial_state=True, **shape)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(inputs, "native"))
    for other in results[1:]:
        for name, expected in results[0].items():
            assert torch.equal(other[name], expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("value_dim", [40, 64, 80])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_column_has_the_same_bits_in_a_whole_slice_and_in_a_part(length, value_dim, dtype, simd_level):
    """With few heads every thread takes other columns, and so other slices of the same state."""
    shape = {"batch": 1, "key_heads": 1, "value_heads": 1, "key_dim": 17, "value_dim": value_dim}
    for seed in range(4):
        inputs = make_inputs("gated_delta", length=length, initial_state=True, dtype=dtype, seed=seed, **shape)
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(inputs.call("native"))
        (o, state), (other_o, other_state) = results
        assert torch.equal(o, other_o) and torch.equal(state, other_state)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=["f64", "f32", "bf16", "f16"]
)
@pytest.mark.parametrize("rule", RULES)
def test_what_runs_beside_a_sequence_does_not_change_its_bits(rule, dtype, simd_level):
    assert_batch_invariant(rule, "native", dtype)


@torch.no_grad()
def test_a_sequence_may_be_cut_after_a_multiple_of_four_tokens_into_parts_of_more_than_eight():
    inputs = make_inputs("gated_efla", batch=1, length=100, dtype=torch.float64)
    tensors = inputs_of(inputs)

    def attend(first, last, state=None):
        parts = (x[:, first:last] for x in tensors)
        return efla.linear_attention(
            *parts, rule="gated_efla", backend="native", initial_state=state, output_final_state=True
        )

    whole = attend(0, 100)
    for cut in range(12, 92, 4):
        o, state = attend(0, cut)
        rest, state = attend(cut, 100, state)
        assert torch.equal(torch.cat([o, rest], dim=1), whole[0]), cut
        assert torch.equal(state, whole[1]), cut


BESIDE = {
    "the batch": lambda given: len(given["k"]) == 3,
    "packing": lambda given: given["cu_seqlens"] is not None,
    "a cut after 36 tokens": lambda given: given["k"].shape[1] == 34,
    "the number of threads (2)": lambda given: torch.get_num_threads() == 2,
}
CHANGED = {
    "o": lambda o, state, k: (o * 1.01, state),
    "final_state": lambda o, state, k: (o, state * 1.01),
    "grad_k": lambda o, state, k: (o + (k - k.detach()).sum(), state),
}


@pytest.mark.parametrize(
    ("what", "changed"), [(w, c) for w in BESIDE for c in CHANGED if "cut" not in w or c != "grad_k"]
)
def test_a_change_of_the_bits_is_found_and_named(what, changed, monkeypatch):
    attend = efla.linear_attention

    def wrong(**given):
        results = attend(**given)
        return CHANGED[changed](*results, given["k"]) if BESIDE[what](given) else results

    monkeypatch.setattr("efla.testing.linear_attention", wrong)
    torch.set_num_threads(1)
    with pytest.raises(
        AssertionError, match=rf"^{re.escape(what)} changes {changed}\b.* of rule 'efla' on native in torch"
    ):
        assert_batch_invariant("efla", "native")


def inputs_of(inputs):
    return inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_decoding_in_place_equals_the_oracle(rule, length):
    inputs = make_inputs(rule, length=length, initial_state=True, key_heads=1, value_heads=2, key_dim=40, value_dim=24)
    expected_o, expected_state = inputs.double().call("reference")
    state = inputs.initial_state.clone()
    o, returned = efla.linear_attention(
        inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate, rule=rule, initial_state=state,
        output_final_state=True, inplace_state=True, backend="native",
    )  # fmt: skip
    assert returned is state
    torch.testing.assert_close(o.double(), expected_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_a_decoded_token_of_a_head_does_not_depend_on_other_heads_or_threads(rule):
    """A task decodes one to eight key heads together, and more than 1 MB of states is prefetched."""
    inputs = make_inputs(
        rule, batch=5, length=1, initial_state=True, key_heads=8, value_heads=16, key_dim=64, value_dim=72
    )

    def attend(tensors, state):
        return efla.linear_attention(
            *tensors, rule=rule, backend="native", initial_state=state, output_final_state=True
        )

    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        o, state = attend(inputs_of(inputs), inputs.initial_state)
        for head in range(8):
            keys, values = slice(head, head + 1), slice(2 * head, 2 * head + 2)
            parts = (keys, keys, values, values, values)
            alone = [None if x is None else x[:, :, part] for x, part in zip(inputs_of(inputs), parts, strict=True)]
            o_alone, state_alone = attend(alone, inputs.initial_state[:, values].contiguous())
            assert torch.equal(o[:, :, values], o_alone) and torch.equal(state[:, values], state_alone)


def test_the_callers_state_is_left_alone_unless_allowed():
    inputs = make_inputs("efla", length=1, initial_state=True)
    before = inputs.initial_state.clone()
    inputs.call("native")
    assert torch.equal(inputs.initial_state, before)


def test_values_outside_a_rules_domain_are_noticed_by_the_kernels():
    inputs = make_inputs("gated_efla", length=70)
    inputs.beta[1, 69, 1] = -0.5
    with pytest.raises(ValueError, match=r"beta must be >= 0, got -0.5"):
        inputs.call("native")
    inputs = make_inputs("gated_efla", length=5)
    inputs.log_gate[0, 0, 0] = 0.25
    with pytest.raises(ValueError, match=r"log_gate must be <= 0 .* got 0.25"):
        inputs.call("native")


@pytest.mark.parametrize("packed", [None, [5, 0, 80]], ids=["dense", "packed"])
def test_the_operator_passes_opcheck_with_a_rule(packed):
    inputs = make_inputs("gated_efla", length=70, packed=packed, initial_state=True)
    q, k, v, beta, log_gate, initial_state = (x.requires_grad_() for x in inputs.tensors().values())
    tensors = (q, k, v, None, None, None, log_gate, beta, initial_state)
    torch.library.opcheck(scan_op, (*tensors, inputs.cu_seqlens, 0.5, 64, "gated_efla", "qk", "native", True))


def test_a_rule_of_ones_own_runs_on_the_kernels_too():
    class Half(UpdateRule):
        name = "half_step"
        title = "half an Euler step"
        order = None
        contractive = False
        has_decay = False

        def coefficients(self, beta, lam, log_gate=None):
            return without_decay(beta / 2)

    inputs = make_inputs("delta", length=70)
    o, _ = efla.linear_attention(inputs.q, inputs.k, inputs.v, inputs.beta, rule=Half(), backend="native")
    expected, _ = replace(inputs, beta=inputs.beta / 2).call("native")
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)


def test_several_python_threads_at_once():
    torch.set_num_threads(2)
    inputs = [make_inputs("gated_efla", length=300, seed=seed) for seed in range(4)]
    expected = [run(x, "native") for x in inputs]
    problems = []

    def work(n: int) -> None:
        for _ in range(10):
            got = run(inputs[n], "native")
            problems.extend(name for name, x in expected[n].items() if not torch.equal(got[name], x))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_forked_child_can_run_it():
    """The parent's threads do not exist in the child: the call must neither hang nor crash there.

    Bytes are compared, since torch's own parallel functions do hang in such a child.
    """
    code = """
import os, sys, torch, efla
from efla.testing import make_inputs
torch.set_num_threads(2)
inputs = make_inputs("efla", length=500, key_dim=64, value_dim=64)
expected, _ = inputs.call("native")
child = os.fork()
if child == 0:
    got, _ = inputs.call("native")
    os._exit(0 if got.numpy().tobytes() == expected.numpy().tobytes() else 3)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert run_fresh(code).returncode == 0


@pytest.mark.parametrize("level", LEVELS)
def test_the_environment_forces_an_instruction_set(level, monkeypatch):
    monkeypatch.setenv("EFLA_SIMD", level)
    done = run_fresh("from efla.scans.backends import native; print(native.kernels.active_simd())")
    assert done.stdout.strip() == level, done.stderr


def test_an_unknown_instruction_set_is_an_error(monkeypatch):
    monkeypatch.setenv("EFLA_SIMD", "avx1024")
    done = run_fresh(
        "import efla, torch; x = torch.rand(1, 3, 1, 4); efla.linear_attention(x, x, x, x[..., 0], backend='native')"
    )
    assert done.returncode != 0
    assert "avx1024" in done.stderr
    assert "baseline" in done.stderr


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strange_numbers_and_strides_never_crash(data):
    """NaN and infinity anywhere, expanded and transposed inputs: an answer or a Python error, and no stray writes."""
    rule = data.draw(st.sampled_from(RULES), "rule")
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4), "lengths")
    inputs = make_inputs(
        rule,
        packed=lengths,
        key_dim=data.draw(st.integers(1, 70), "K"),
        value_dim=data.draw(st.integers(1, 70), "V"),
        value_heads=data.draw(st.sampled_from([2, 4, 6]), "Hv"),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), "dtype"),
        initial_state=data.draw(st.booleans(), "state"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    for name in data.draw(st.sets(st.sampled_from(sorted(inputs.tensors()))), "poisoned"):
        x = getattr(inputs, name)
        if x.numel():
            place = data.draw(st.integers(0, x.numel() - 1), "place")
            x.view(-1)[place] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38]), "value")
    if data.draw(st.booleans(), "expanded"):
        inputs = replace(inputs, k=inputs.k[:, :, :1].expand_as(inputs.k))
    with efla.validation("off"):
        results = run(inputs, "native")
    assert results["o"].shape == inputs.v.shape
