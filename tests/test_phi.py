"""phi1 and its relatives against mpmath, forwards and through two derivatives."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from efla.phi import expm1, flow_integral, phi1, rational_step

POINTS = np.concatenate([[0.0], np.logspace(-40, 30, 400), np.linspace(0.01, 5, 200), [1.9999999, 2.0, 2.0000001]])
DTYPES = [torch.float32, torch.float64]


def exact_phi1(x: float, derivative: int = 0) -> mpmath.mpf:
    """The n-th derivative of phi1: (-1)^n times the n-th exponential moment, by 60-digit arithmetic."""
    with mpmath.workdps(60):
        x = mpmath.mpf(x)
        if x < 1:
            terms = ((-x) ** j / (mpmath.factorial(j) * (derivative + j + 1)) for j in range(60))
            return (-1) ** derivative * mpmath.fsum(terms)
        moment = mpmath.gammainc(derivative + 1, 0, x) / x ** (derivative + 1)
        return (-1) ** derivative * moment


def relative_errors(values: torch.Tensor, exact: list[mpmath.mpf]) -> list[float]:
    tiny = torch.finfo(values.dtype).tiny
    pairs = zip(values.double().tolist(), exact, strict=True)
    return [float(abs(mpmath.mpf(v) - e) / abs(e)) for v, e in pairs if abs(e) > tiny]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phi1_is_right_to_four_ulp_from_zero_to_1e30(dtype):
    x = torch.tensor(POINTS, dtype=dtype)
    errors = relative_errors(phi1(x), [exact_phi1(v) for v in x.double().tolist()])
    assert max(errors) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("derivative", [1, 2])
def test_derivatives_of_phi1_are_accurate(dtype, bound, derivative):
    x = torch.tensor(POINTS, dtype=dtype, requires_grad=True)
    value = phi1(x)
    for _ in range(derivative):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    errors = relative_errors(value.detach(), [exact_phi1(v, derivative) for v in x.detach().double().tolist()])
    assert max(errors) <= bound


def test_phi1_passes_gradcheck_and_gradgradcheck():
    x = torch.tensor([0.0, 1e-9, 1e-4, 0.3, 1.0, 1.99, 2.01, 7.0, 40.0], dtype=torch.float64, requires_grad=True)
    shifted = x + 1e-3  # the finite differences must not reach below zero
    assert torch.autograd.gradcheck(phi1, (shifted.detach().requires_grad_(),))
    assert torch.autograd.gradgradcheck(phi1, (shifted.detach().requires_grad_(),))


def test_half_precision_is_widened():
    assert phi1(torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32
    assert phi1(torch.tensor([0.5], dtype=torch.float16)).dtype == torch.float32


def test_phi1_compiles():
    x = torch.linspace(0, 5, 20, requires_grad=True)
    compiled = torch.compile(phi1, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(phi1(x).sum(), x)
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (flow_integral, lambda b, r: b * exact_phi1(b * r)),
        (rational_step, lambda b, r: b / (1 + b * r)),
    ],
    ids=["flow_integral", "rational_step"],
)
def test_steps_hold_where_beta_times_rate_overflows_float32(function, exact):
    beta = torch.tensor([0.0, 1e-6, 0.3, 1.0, 1.0, 1e4, 1e4], requires_grad=True)
    rate = torch.tensor([1e36, 1e6, 2.0, 0.0, 1e-36, 1e36, 1e-3], requires_grad=True)
    value = function(beta, rate)
    expected = [exact(mpmath.mpf(b), mpmath.mpf(r)) for b, r in zip(beta.tolist(), rate.tolist(), strict=True)]
    assert max(relative_errors(value.detach(), expected)) <= 8 * torch.finfo(torch.float32).eps
    grads = torch.autograd.grad(value.sum(), (beta, rate))
    assert all(torch.isfinite(g).all() for g in grads)


def test_small_exponentials_keep_their_gradients():
    """torch.expm1's derivative is expm1(x) + 1: zero at -40 already, in float64 too."""
    x = torch.tensor([-1e-8, -1.0, -40.0, -80.0, -700.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(expm1(x).sum(), x)
    torch.testing.assert_close(expm1(x), torch.expm1(x), rtol=0, atol=0)
    torch.testing.assert_close(grad, x.detach().exp(), rtol=1e-15, atol=0)
    beta = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(flow_integral(beta, torch.tensor([25.0], dtype=torch.float64)).sum(), beta)
    assert float(grad) == pytest.approx(float(mpmath.exp(-50)), rel=1e-12)


def test_flow_integral_with_offset_passes_gradcheck_on_both_sides_of_its_switch():
    beta = torch.tensor([1e-2, 0.5, 0.999, 1.001, 3.0], dtype=torch.float64, requires_grad=True)
    rate = torch.tensor([2.0, 1.0, 1.0, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    offset = torch.tensor([0.1, 0.2, 3.0, 3.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(flow_integral, (beta, rate, offset))


@pytest.mark.parametrize("offset", [None, 0.5, 3.0])
def test_the_gradient_of_beta_has_all_its_digits_where_a_step_is_stiff(offset):
    """d/dbeta of the integral without offset is exp(-beta rate): 1e-17 at 40, far below the terms that a quotient has."""
    beta = torch.tensor([0.5, 1.01, 2.0, 10.0, 30.0, 49.0], dtype=torch.float64, requires_grad=True)
    rate = torch.ones_like(beta)
    shift = None if offset is None else torch.full_like(beta, offset)
    (got,) = torch.autograd.grad(flow_integral(beta, rate, offset=shift).sum(), beta)
    with mpmath.workdps(60):
        d = mpmath.mpf(offset or 0)
        exact = [mpmath.diff(lambda b: b * (1 - mpmath.exp(-(d + b))) / (d + b), mpmath.mpf(b)) for b in beta.tolist()]
    assert max(relative_errors(got, exact)) <= 1e-12
