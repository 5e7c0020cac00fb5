"""Every backend equals the float64 oracle: outputs, final state and all gradients, within the budget of efla.testing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from efla.testing import make_inputs
from tests.scans.cases import RULES, SHAPES, assert_all_match


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_backend_matches_the_oracle(rule, shape):
    assert_all_match(make_inputs(rule, **SHAPES[shape]))


@pytest.mark.parametrize("rule", ["efla", "gated_efla", "gated_delta", "ssd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["initial_state", "packed", "l2_norm"])
def test_every_backend_matches_the_oracle_in_other_precisions(rule, dtype, shape):
    assert_all_match(make_inputs(rule, dtype=dtype, **SHAPES[shape]))


@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_the_chunk_size_changes_nothing(rule):
    assert_all_match(make_inputs(rule, length=150, initial_state=True), chunk_sizes=(16, 32, 128, 256))


@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_non_contiguous_inputs(backend, rule):
    inputs = make_inputs(rule, batch=3, length=40, key_heads=2, value_heads=4)
    expected_o, expected_state = inputs.call(backend)
    strided = {name: _strided(x) for name, x in inputs.tensors().items()}
    assert not any(x.is_contiguous() for x in strided.values())
    o, state = replace(inputs, **strided).call(backend)
    torch.testing.assert_close(o, expected_o, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as every second entry of a larger buffer whose first two axes are swapped."""
    buffer = torch.full((x.shape[1], x.shape[0], *x.shape[2:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    view = buffer.transpose(0, 1)[..., ::2]
    view.copy_(x)
    return view


@pytest.mark.parametrize("rule", ["efla", "gated_efla", "ssd"])
def test_gradcheck(backend, rule):
    inputs = make_inputs(
        rule, batch=1, length=18, key_heads=1, value_heads=2, key_dim=3, value_dim=2, initial_state=True,
        dtype=torch.float64,
    )  # fmt: skip
    names = list(inputs.tensors())

    def function(*leaves):
        return replace(inputs, **dict(zip(names, leaves, strict=True))).call(backend, chunk_size=16)

    leaves = [x.requires_grad_() for x in inputs.tensors().values()]
    assert torch.autograd.gradcheck(function, leaves)


def test_an_empty_batch(backend):
    o, state = make_inputs("gated_efla", batch=0, length=5, initial_state=True).call(backend)
    assert o.shape == (0, 5, 2, 16)
    assert state.shape == (0, 2, 16, 16)


@pytest.mark.parametrize("rule", ["efla", "gated_delta"])
def test_an_empty_sequence_keeps_its_state(backend, rule):
    inputs = make_inputs(rule, length=0, initial_state=True)
    o, state = inputs.call(backend)
    assert o.shape == inputs.v.shape
    assert inputs.initial_state is not None
    torch.testing.assert_close(state, inputs.initial_state, rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)], ids=["no sequences", "no tokens"])
def test_gradients_of_nothing_are_empty(backend, batch, length):
    inputs = make_inputs("gated_efla", batch=batch, length=length)
    leaves = [x.requires_grad_() for x in inputs.tensors().values()]
    inputs.call(backend)[0].sum().backward()  # the gradient of a sum is expanded: all its strides are 0
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
