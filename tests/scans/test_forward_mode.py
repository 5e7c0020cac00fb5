"""Forward-mode derivatives: right on the backend that torch differentiates, refused by name on the others, never zero."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import efla
from efla.errors import BackendUnavailable
from efla.layers import LinearAttention, Mamba2
from efla.testing import make_inputs
from tests.scans.cases import BACKENDS, RULES


def scan_of(inputs, backend="auto"):
    names = list(inputs.tensors())

    def function(*tensors):
        return efla.testing.replace(inputs, **dict(zip(names, tensors, strict=True))).call(backend)

    return function, tuple(inputs.tensors().values())


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_tangent_is_the_transpose_of_the_gradient(rule, qk_l2norm):
    """<c, J t> = <J^T c, t>, with J^T from the tested backward pass, in float64."""
    inputs = make_inputs(
        rule, length=12, key_dim=4, value_dim=4, dtype=torch.float64, initial_state=True, qk_l2norm=qk_l2norm
    )
    function, tensors = scan_of(inputs)
    tangents = tuple(torch.randn_like(x) for x in tensors)
    outputs, pushed = torch.func.jvp(function, tensors, tangents)
    leaves = [x.clone().requires_grad_() for x in tensors]
    cotangents = [torch.randn_like(x) for x in outputs]
    pulled = torch.autograd.grad(function(*leaves), leaves, cotangents, allow_unused=True)
    forward = sum((c * t).sum() for c, t in zip(cotangents, pushed, strict=True))
    backward = sum((g * t).sum() for g, t in zip(pulled, tangents, strict=True) if g is not None)
    assert forward.abs() > 1e-3
    torch.testing.assert_close(forward, backward, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_without_one_refuse_by_name(name):
    inputs = make_inputs("efla", length=12)
    function, tensors = scan_of(inputs, name)
    message = rf"backend '{name}' has no forward-mode derivative.*use backend='auto' or one of 'reference'$"
    with pytest.raises(BackendUnavailable, match=message):
        torch.func.jvp(function, tensors, tensors)
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(BackendUnavailable, match=message):
        function(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])


LAYERS = {
    "attention": lambda: LinearAttention(32, num_heads=2, head_dim=16, rule="gated_efla"),
    "mamba2": lambda: Mamba2(32, head_dim=16, state_size=8),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_them_too(name):
    """Wide enough for the row kernels, which step aside as well."""
    layer = LAYERS[name]().double()
    x, tangent = torch.randn(4, 300, 32, dtype=torch.float64), torch.randn(4, 300, 32, dtype=torch.float64)
    _, pushed = torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))
    step = 1e-6
    with torch.no_grad():
        expected = (layer(x + step * tangent)[0] - layer(x - step * tangent)[0]) / (2 * step)
    assert (pushed - expected).norm() <= 1e-6 * expected.norm()
