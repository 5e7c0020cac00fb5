"""What callers may pass to the native kernels: whatever it is, it is computed right or refused, and nothing else is touched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import efla
from efla import native
from efla.layers import RMSNorm, ShortConvolution, SwiGLU
from efla.native import kernels, rows
from efla.testing import make_inputs
from tests.native.kernel_calls import KERNELS, Sizes, misfits, places_of, random_calls, replaced

pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels were not built")


@pytest.fixture(autouse=True)
def _kernels_at_any_size(monkeypatch):
    monkeypatch.setattr(rows, "_SMALL", 0)


def decode_inputs(batch=2, heads=2, width=16, rule="gated_delta"):
    inputs = make_inputs(
        rule, batch=batch, length=1, key_heads=heads, value_heads=heads, key_dim=width, value_dim=width,
        initial_state=True,
    )  # fmt: skip
    return inputs


def decode(inputs, **changes):
    arguments = {**inputs.tensors(), "rule": inputs.rule, "output_final_state": True, "backend": "native", **changes}
    return efla.linear_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


# Row kernels: a module, inputs that do not fit it, and what the error names.
@pytest.mark.parametrize("num_rows", [3, 3000], ids=["small", "large"])
def test_a_norm_of_another_width_is_refused(num_rows, monkeypatch):
    monkeypatch.setattr(rows, "_SMALL", 8192)
    with pytest.raises(ValueError, match=r"rows of width 64.*got \[\d+, 256\]"):
        RMSNorm(64)(torch.randn(num_rows, 256))


@pytest.mark.parametrize("tokens", [2, 100])
def test_a_convolution_of_other_shapes_is_refused(tokens):
    conv = ShortConvolution(64)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 64\], got \[2, \d+, 256\]"):
        conv(torch.randn(2, tokens, 256))
    for shape in ((3, 64, 3), (2, 64, 5), (2, 32, 3)):
        with pytest.raises(ValueError, match=r"state must have shape \[B, D, W - 1\] = \[2, 64, 3\], got"):
            conv(torch.randn(2, tokens, 64), state=torch.randn(shape))
    with pytest.raises(ValueError, match=r"mask must have shape \[B, T\]"):
        conv(torch.randn(2, tokens, 64), mask=torch.ones(2, tokens + 1, dtype=torch.bool))


@pytest.mark.parametrize("name", KERNELS)
def test_an_empty_batch_fits(name):
    """Its tensors have no memory, and are there all the same."""
    getattr(kernels, name)(*KERNELS[name](Sizes(batch=0)))


@pytest.mark.parametrize("name", KERNELS)
def test_no_bound_kernel_takes_a_tensor_that_does_not_fit(name):
    """Each tensor of each kernel in turn is replaced; a kernel that is bound later is tried by the same loop."""
    assert {n for n in dir(kernels) if n.endswith(("forward", "backward", "step", "products"))} == set(KERNELS)
    arguments = KERNELS[name](Sizes())
    getattr(kernels, name)(*arguments)
    conv_state = {"mixer_step": (9,), "block_step": (16,)}.get(name)
    for place, x in places_of(arguments).items():
        for wrong in misfits(x, any_strides=name in ("forward", "backward") and place in ((6,), (7,))):
            if place == conv_state and getattr(wrong, "shape", None) == (*x.shape[:2], x.shape[2] + 1):
                continue  # W inputs, as transformers keeps them, fit as well
            with pytest.raises((ValueError, TypeError)):
                getattr(kernels, name)(*replaced(arguments, place, wrong))


def test_the_module_cannot_be_bound_to_take_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor"):
        kernels.forward("q", *KERNELS["forward"](Sizes())[1:])


def test_without_torch_s_c_table_the_public_protocol_is_used():
    """An older torch has no C table; the boundary then asks for DLPack capsules and the results are the same."""
    plain = make_inputs("gated_efla", length=70)
    with torch.no_grad():
        expected = plain.call("native")
    native.bind_torch(use_c_table=False)
    try:
        with torch.no_grad():
            o, state = plain.call("native")
        leaf = plain.q.clone().requires_grad_()
        efla.linear_attention(leaf, plain.k, plain.v, plain.beta, plain.log_gate, rule="gated_efla")[0].sum().backward()
    finally:
        native.bind_torch()
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    assert leaf.grad is not None and leaf.grad.isfinite().all()


VIEWS = {
    "negative view": lambda x: torch._neg_view(-x),
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_that_are_not_plain_memory_are_read_as_the_numbers_they_are(view, grad):
    make = VIEWS[view]
    inputs = make_inputs("gated_efla", length=40, initial_state=True)
    names = list(inputs.tensors())
    x, weight = torch.randn(6, 40, 16), torch.randn(16)
    norm, conv, mlp = RMSNorm(16), ShortConvolution(16), SwiGLU(16, 16)
    with torch.set_grad_enabled(grad):
        for name in names:
            seen = make(inputs.tensors()[name].clone())
            results = [decode(inputs, **{name: t}) for t in (seen, seen.clone(memory_format=torch.contiguous_format))]
            assert torch.equal(results[0][0], results[1][0]), name
            assert torch.equal(results[0][1], results[1][1]), name
        for function in (norm, lambda t: conv(t)[0], mlp, lambda t: rows.swiglu(t, t)):
            seen = make(x)
            torch.testing.assert_close(function(seen), function(seen.clone(memory_format=torch.contiguous_format)))
        seen = make(weight)
        assert torch.equal(rows.rms_norm(x, seen, 1e-6), rows.rms_norm(x, seen.clone(), 1e-6))


def test_gradients_that_negate_their_memory_are_read_right():
    inputs = make_inputs("efla", length=40)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.beta)]
    o, _ = efla.linear_attention(*leaves, backend="native")
    cotangent = torch.randn_like(o)
    expected = torch.autograd.grad(o, leaves, -cotangent, retain_graph=True)
    got = torch.autograd.grad(o, leaves, torch._neg_view(cotangent))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_memory_that_was_given_back_is_refused(backend):
    inputs = decode_inputs()
    gone = torch.randn(2, 2, 2, 16, 16)
    state = gone[1]  # its address is not null, only its storage's is
    gone.untyped_storage().resize_(0)
    for in_place in (False, True):
        with torch.no_grad(), pytest.raises(ValueError, match="initial_state has no memory"):
            decode(inputs, initial_state=state, inplace_state=in_place, backend=backend)


def test_read_only_memory_is_no_state_to_update(tmp_path):
    inputs = decode_inputs()
    shape = tuple(inputs.initial_state.shape)
    np.lib.format.open_memmap(tmp_path / "state.npy", mode="w+", dtype=np.float32, shape=shape)[:] = 1
    with pytest.warns(UserWarning, match="not writable"):
        state = torch.from_numpy(np.load(tmp_path / "state.npy", mmap_mode="r"))
    with torch.no_grad():
        decode(inputs, initial_state=state)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"initial_state is read-only memory.*clone\(\)"):
                decode(inputs, initial_state=state, inplace_state=True)


# In place: beta, or the logarithm of the gate, outside of its domain.
BAD_VALUES = {"beta": -0.5, "log_gate": 0.5}


@pytest.mark.parametrize("name", BAD_VALUES)
@pytest.mark.parametrize("length", [1, 3, 30])
def test_a_refused_call_leaves_the_state_alone(name, length):
    inputs = make_inputs("gated_delta", length=length, initial_state=True)
    inputs.tensors()[name][-1, -1, -1] = BAD_VALUES[name]
    before, version = inputs.initial_state.clone(), inputs.initial_state._version
    for backend, grad in itertools.product(["native", "auto"], [False, True]):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"{name} must be"):
            decode(inputs, inplace_state=True, backend=backend)
    assert torch.equal(inputs.initial_state, before)
    assert inputs.initial_state._version == version


@pytest.mark.parametrize("length", [1, 3, 30])
def test_a_token_is_applied_once_where_values_are_not_checked(length):
    inputs = make_inputs("gated_delta", length=length, initial_state=True)
    inputs.beta[0, 0, 0] = -0.5
    with torch.no_grad(), efla.validation("off"):
        expected_o, expected = decode(inputs)
        o, state = decode(inputs, inplace_state=True)
    assert state is inputs.initial_state
    assert torch.equal(o, expected_o)
    assert torch.equal(state, expected)


def test_an_update_in_place_counts_as_one_for_autograd():
    inputs = decode_inputs()
    factor = torch.ones((), requires_grad=True)
    loss = (factor * inputs.initial_state).square().sum()
    for packed in (None, torch.tensor([0, 1, 2])):
        version = inputs.initial_state._version
        with torch.no_grad():
            if packed is None:
                decode(inputs, inplace_state=True)
            else:
                row = {name: x.transpose(0, 1) for name, x in inputs.tensors().items() if name != "initial_state"}
                decode(inputs, **row, cu_seqlens=packed, inplace_state=True)
        assert inputs.initial_state._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_made_in_inference_mode_can_be_updated():
    inputs = decode_inputs()
    with torch.no_grad():
        expected = decode(inputs)[1]
    with torch.inference_mode():
        state = inputs.initial_state.clone()
        assert decode(inputs, initial_state=state, inplace_state=True)[1] is state
    assert torch.equal(state, expected)


def test_transforms_of_functorch_are_seen():
    """Inside a transform a tensor's own memory is not its value; the fast call must not look at it."""
    inputs = decode_inputs(rule="efla")

    def loss(q):
        with torch.no_grad():
            inner = decode(inputs, q=q)[0]
        return (q * inner).sum()

    gradient = torch.func.grad(loss)(inputs.q)
    torch.testing.assert_close(gradient, decode(inputs)[0])


def test_random_calls_are_computed_or_refused():
    """A small run of what ``make test-sanitizers`` runs a million times under the address sanitizer."""
    assert random_calls(500, seed=0) > 100
