"""Ways of cutting the same work: packed, split with the state carried over, padded. All give one result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import efla
from efla.testing import ScanInputs, assert_close, expect, make_inputs, oracle, run
from tests.scans.cases import CONTENDERS, RULES, assert_all_match, contender

drawn = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@drawn
def test_any_shape_matches_the_oracle(data):
    heads = data.draw(st.integers(1, 3), "key heads")
    key_dim = data.draw(st.integers(1, 40), "key_dim")
    inputs = make_inputs(
        data.draw(st.sampled_from(RULES), "rule"),
        length=data.draw(st.integers(1, 140), "length"),
        batch=data.draw(st.integers(1, 3), "batch"),
        key_heads=heads,
        value_heads=heads * data.draw(st.integers(1, 3), "group"),
        key_dim=key_dim,
        value_dim=data.draw(st.integers(1, 40), "value_dim"),
        packed=data.draw(st.none() | st.lists(st.integers(0, 80), min_size=1, max_size=5), "packed"),
        initial_state=data.draw(st.booleans(), "initial_state"),
        qk_l2norm=key_dim > 1 and data.draw(st.booleans(), "qk_l2norm"),  # the width 1 has a test of its own
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    assert_all_match(inputs, chunk_sizes=[data.draw(st.sampled_from([16, 32, 64]), "chunk")])


@pytest.mark.parametrize("rule", ["linear", "delta", "gated_efla"])
@pytest.mark.parametrize("seed", range(8))
def test_a_normalised_key_of_one_entry_has_the_gradient_that_rounding_leaves(rule, seed):
    """x / |x| of one entry is a sign: its gradient g (1 - u^2) / |x| is the difference of two equal terms, which no float32
    formula can hold to more than a few roundings of g / |x|, the gradient by the sign over |x|."""
    inputs = make_inputs(rule, length=5, batch=2, key_dim=1, value_dim=3, initial_state=True, qk_l2norm=True, seed=seed)
    expected = expect(inputs)
    terms = oracle(replace(inputs, q=inputs.q.sign(), k=inputs.k.sign(), qk_l2norm=False))
    rest = {name: x for name, x in expected.truth.items() if name not in ("grad_q", "grad_k")}
    for name in CONTENDERS:
        with contender(name) as backend:
            found = run(inputs, backend)
        for key in ("q", "k"):
            size = terms[f"grad_{key}"].abs() / getattr(inputs, key).abs()
            error = (found[f"grad_{key}"].double() - expected.truth[f"grad_{key}"]).abs()
            assert (error <= 16 * 2**-24 * size.max()).all(), f"{name}, grad_{key}: {(error / size.max()).max()}"
        assert_close(found, rest, expected.honest)


@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_packed_sequences_equal_separate_runs(backend, rule):
    lengths = [17, 64, 1, 100]
    inputs = make_inputs(rule, packed=lengths, initial_state=True)
    o, state = inputs.call(backend)
    start = 0
    for n, length in enumerate(lengths):
        alone = _tokens(inputs, start, start + length, inputs.initial_state[n : n + 1])
        o_alone, state_alone = alone.call(backend)
        torch.testing.assert_close(o[:, start : start + length], o_alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[n : n + 1], state_alone, rtol=1e-5, atol=1e-6)
        start += length


@pytest.fixture(scope="module")
def uncut():
    return expect(make_inputs("gated_efla", length=130, initial_state=True))


@given(cut=st.integers(0, 130))
@drawn
def test_a_sequence_cut_anywhere_with_the_state_carried_equals_one_run(uncut, backend, cut):
    leaves = {name: x.clone().requires_grad_() for name, x in uncut.inputs.tensors().items()}
    tracked = replace(uncut.inputs, **leaves)
    first, middle = _tokens(tracked, 0, cut, tracked.initial_state).call(backend)
    second, final = _tokens(tracked, cut, 130, middle).call(backend)
    o = torch.cat([first, second], 1)
    generator = torch.Generator().manual_seed(7)  # the cotangents of efla.testing.run
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in (o, final))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    got = {"o": o, "final_state": final} | {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
    assert_close(got, uncut.truth, uncut.honest)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_what_stands_in_padding_never_reaches_a_real_token(backend, side):
    """A padded token is the step log_decay = erase = write = 0: its contents are bit-for-bit irrelevant."""
    q, k, v, log_decay, erase, write, is_padding = _padded(side)
    outputs = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        noisy = [
            torch.where(is_padding[..., None, None], torch.randn(x.shape, generator=generator), x) for x in (q, k, v)
        ]
        outputs.append(efla.scan(*noisy, log_decay, erase, write, output_final_state=True, backend=backend))
    (o_1, state_1), (o_2, state_2) = outputs
    torch.testing.assert_close(o_1[~is_padding], o_2[~is_padding], rtol=0, atol=0)
    torch.testing.assert_close(state_1, state_2, rtol=0, atol=0)


def test_padding_on_the_right_is_as_good_as_none(backend):
    q, k, v, log_decay, erase, write, is_padding = _padded("right")
    real = int((~is_padding[0]).sum())
    full, state = efla.scan(q, k, v, log_decay, erase, write, output_final_state=True, backend=backend)
    short, short_state = efla.scan(
        *(x[:1, :real] for x in (q, k, v, log_decay, erase, write)), output_final_state=True, backend=backend
    )
    # Our kernels compute the same bits for any batch; torch's products, which chunked is made of, may not.
    tolerance = {"rtol": 0, "atol": 0} if backend == "native" else {}
    torch.testing.assert_close(full[:1, :real], short, **tolerance)
    torch.testing.assert_close(state[:1], short_state, **tolerance)


def test_padded_tokens_get_exactly_zero_gradient(backend):
    q, k, v, log_decay, erase, write, is_padding = _padded("inside")
    k, v = k.requires_grad_(), v.requires_grad_()
    o, state = efla.scan(q, k, v, log_decay, erase, write, output_final_state=True, backend=backend)
    loss = (o * torch.randn_like(o))[~is_padding].sum() + (state * torch.randn_like(state)).sum()
    grads = torch.autograd.grad(loss, (k, v))
    for grad in grads:
        assert (grad[is_padding] == 0).all()
        assert (grad[~is_padding] != 0).any()


def _padded(side: str):
    inputs = make_inputs("gated_efla", length=96, batch=2)
    coefficients = efla.rules.get("gated_efla").coefficients(inputs.beta, (inputs.k**2).sum(-1), inputs.log_gate)
    position = torch.arange(96).expand(2, -1)
    is_padding = {"left": position < 20, "right": position >= 70, "inside": (position > 30) & (position < 50)}[side]
    log_decay, erase, write = (torch.where(is_padding[..., None], 0, x) for x in coefficients)
    return inputs.q, inputs.k, inputs.v, log_decay, erase, write, is_padding


def _tokens(inputs: ScanInputs, start: int, end: int, initial_state) -> ScanInputs:
    names = [name for name in inputs.tensors() if name != "initial_state"]
    parts = {name: getattr(inputs, name)[:, start:end] for name in names}
    return replace(inputs, **parts, initial_state=initial_state, cu_seqlens=None)
