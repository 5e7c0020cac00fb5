"""The CPU kernels around the scan against torch's own formulas in float64: values, gradients, and where they step aside."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from efla.layers import RMSNorm, ShortConvolution
from efla.native import kernels, rows

pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels were not built")

# Units in the last place of the result's size; gradients of weights are sums over all rows.
ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.fixture(params=kernels.simd_levels() if kernels else [])
def simd(request):
    before = kernels.active_simd()
    kernels.set_simd(request.param)
    yield request.param
    kernels.set_simd(before)


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(rows, "_SMALL", 0)


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def compare(found, inputs, expected, exact, dtype, slope=0.0):
    """Values and gradients within 16 roundings of the largest entry, or of ``slope`` times the largest incoming gradient."""
    grad = torch.randn_like(expected).to(dtype).double()
    wanted = torch.autograd.grad(expected, exact, grad)
    given = torch.autograd.grad(found, inputs, grad.to(dtype))
    for a, b in zip((found, *given), (expected, *wanted), strict=True):
        assert a.dtype == dtype
        error, size = (a.double() - b).abs().max(), torch.maximum(b.abs().max(), slope * grad.abs().max())
        assert error <= 16 * ROUNDING[dtype] * size, f"{error:.2e} of {size:.2e}"


def unit_rows(x):
    """x / |x|, and 1 / |x| of the shortest row: the size of the two terms that the gradient is a difference of."""
    norm = (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return x / norm, 1 / norm.detach().min()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (37, 64), (2, 70, 3, 24), (5, 300), (130, 16)], ids=str)
def test_norms_are_torch_s(simd, dtype, shape):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = functional.rms_norm(exact[0], shape[-1:], exact[1], 1e-6)
    unit, slope = unit_rows(exact[0])
    compare(rows.rms_norm(x, weight, 1e-6), (x, weight), expected, exact, dtype, slope * weight.detach().abs().max())
    compare(rows.l2_norm(x, 1e-6), (x,), unit, exact[:1], dtype, slope)
    gate = draw(*shape, dtype=dtype)
    exact.append(gate.detach().double().requires_grad_())
    expected = functional.rms_norm(exact[0], shape[-1:], exact[1], 1e-6) * functional.silu(exact[2])
    slope = slope * weight.detach().abs().max() * gate.detach().abs().max()
    compare(rows.rms_norm(x, weight, 1e-6, gate), (x, weight, gate), expected, exact, dtype, slope)


@pytest.mark.parametrize("size", [1e-17, 1e-6, 1e17])
def test_norms_of_tiny_and_huge_rows_keep_their_gradients(simd, size):
    x = (draw(40, 32).detach() * size).float().requires_grad_()
    exact = x.detach().double().requires_grad_()
    unit, slope = unit_rows(exact)
    compare(rows.l2_norm(x, 1e-6), (x,), unit, (exact,), torch.float32, slope)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "channels", "width"),
    [(1, 1, 1, 4), (2, 3, 5, 4), (3, 150, 20, 4), (2, 64, 32, 2), (1, 131, 300, 7)],
)
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("extras", [(), ("bias", "past")], ids=["plain", "bias+past"])
def test_the_convolution_is_torch_s(simd, dtype, batch, length, channels, width, silu, extras):
    x, weight = draw(batch, length, channels, dtype=dtype), draw(channels, width, dtype=dtype)
    bias = draw(channels, dtype=dtype) if "bias" in extras else None
    past = draw(batch, channels, width - 1, dtype=dtype) if "past" in extras else None
    inputs = [t for t in (x, weight, bias, past) if t is not None]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias, past)]
    window = torch.zeros(batch, channels, width - 1, dtype=torch.float64) if exact[3] is None else exact[3]
    window = torch.cat([window, exact[0].transpose(1, 2)], dim=2)
    expected = functional.conv1d(window, exact[1][:, None], exact[2], groups=channels).transpose(1, 2)
    expected = functional.silu(expected) if silu else expected
    found = rows.causal_conv(x, weight, bias, past, None, silu)
    compare(found, inputs, expected, [t for t in exact if t is not None], dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (37, 64), (2, 70, 300)], ids=str)
def test_the_gate_is_torch_s(simd, dtype, shape):
    gate, up = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    expected = functional.silu(exact[0]) * exact[1]
    compare(rows.swiglu(gate, up), (gate, up), expected, exact, dtype)


def test_the_gate_far_from_zero_is_open_or_shut_without_a_nan(simd):
    gate = torch.tensor([-1e30, -200.0, -100.0, -88.0, 88.0, 100.0, 200.0, 1e30], requires_grad=True)
    up = torch.full_like(gate, 2.0, requires_grad=True)
    y = rows.swiglu(gate, up)
    found = torch.autograd.grad(y.sum(), (gate, up))
    torch.testing.assert_close(y, functional.silu(gate) * up, rtol=1e-5, atol=1e-30)
    assert found[0].tolist()[4:] == [2.0] * 4
    assert all(abs(x) < 1e-30 for x in found[0].tolist()[:4])
    torch.testing.assert_close(found[1], functional.silu(gate).detach(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (1, 3), (2, 17), (3, 40), (4, 100), (5, 8), (16, 33)])
def test_products_of_a_few_rows_are_the_matrix_products(simd, dtype, num_rows, width):
    x = torch.randn(num_rows, width).to(dtype)
    weights = [torch.randn(columns, width).to(dtype) for columns in (1, 7, 8, 70)]
    with torch.no_grad():
        results = rows.products(x, weights)
        (gated,) = rows.products(x, weights[2:3] * 2, gated=True)
    assert results is not None
    for y, weight in zip(results, weights, strict=True):
        exact = x.double() @ weight.double().T
        # One rounding of the result, and of a sum of at most `width` terms.
        terms = x.double().abs() @ weight.double().abs().T
        budget = (
            torch.finfo(dtype).eps * exact.abs()
            + width * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * terms
        )
        assert ((y.double() - exact).abs() <= budget).all()
    inner = results[2].double()
    torch.testing.assert_close(
        gated.double(), functional.silu(inner) * inner, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
    )


def test_a_row_has_the_same_products_in_every_batch(simd):
    """Bit for bit, so that a sequence decodes alike whatever decodes beside it."""
    x, weight = torch.randn(16, 100), torch.randn(45, 100)
    with torch.no_grad():
        (whole,) = rows.products(x, [weight])
        for size in (1, 2, 3, 4, 7):
            for start in range(0, 16 - size, size):
                (part,) = rows.products(x[start : start + size], [weight])
                assert torch.equal(part, whole[start : start + size])


def test_products_leave_training_long_inputs_and_autocast_to_torch():
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    assert rows.products(x, [weight]) is None  # gradients are recorded
    with torch.no_grad():
        assert rows.products(torch.randn(17, 8), [weight]) is None
        assert rows.products(x, [weight.double()]) is None
        assert rows.products(x, [torch.randn(8, 3).T]) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert rows.products(x, [weight]) is None
        with rows.without_kernels():
            assert rows.products(x, [weight]) is None
        assert rows.products(x, [weight]) is not None


def test_packed_sequences_do_not_see_each_other(simd):
    borders = [0, 0, 1, 4, 70, 70, 200]
    x, weight, bias = draw(1, 200, 19), draw(19, 4), draw(19)
    past = draw(len(borders) - 1, 19, 3)
    found = rows.causal_conv(x, weight, bias, past, torch.tensor(borders, dtype=torch.int32), True)
    alone = [
        rows.torch_conv(x[:, a:b], weight, bias, past[n : n + 1], None, True)
        for n, (a, b) in enumerate(pairwise(borders))
    ]
    compare(found, (x, weight, bias, past), torch.cat(alone, dim=1), (x, weight, bias, past), torch.float64)


def test_strided_inputs_are_taken_as_they_are():
    whole = draw(2, 90, 80)
    x, weight = whole[..., 16:48], draw(32, 4)
    expected = rows.torch_conv(x.contiguous(), weight, None, None, None, True)
    compare(rows.causal_conv(x, weight, None, None, None, True), (whole,), expected, (whole,), torch.float64)
    expected = rows._torch_norm(x, weight[:, 0], None, 1 / 32, 1e-6)
    compare(rows.rms_norm(x, weight[:, 0], 1e-6), (whole,), expected, (whole,), torch.float64)
    gate, up = whole[..., :40], whole[..., 40:]
    compare(rows.swiglu(gate, up), (whole,), functional.silu(gate) * up, (whole,), torch.float64)


def test_results_do_not_depend_on_the_number_of_threads():
    x, weight, kernel = (
        draw(3, 700, 64, dtype=torch.float32),
        draw(64, dtype=torch.float32),
        draw(64, 4, dtype=torch.float32),
    )
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y = rows.rms_norm(x, weight, 1e-6) + rows.causal_conv(x, kernel, None, None, None, True)
        y = rows.rms_norm(rows.swiglu(y, x), weight, 1e-6, x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight, kernel))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_second_derivatives_go_through_torch():
    x, weight, kernel = draw(2, 9, 6), draw(6), draw(6, 3)
    assert torch.autograd.gradgradcheck(rows.swiglu, (x, draw(2, 9, 6)))
    assert torch.autograd.gradgradcheck(lambda x, w: rows.rms_norm(x, w, 1e-6), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w, z: rows.rms_norm(x, w, 1e-6, z), (x, weight, draw(2, 9, 6)))
    assert torch.autograd.gradgradcheck(lambda x: rows.l2_norm(x, 1e-6), (x,))
    assert torch.autograd.gradgradcheck(
        lambda x, w: rows.causal_conv(x, w, None, None, None, True), (x, kernel), atol=1e-6
    )


def test_transformed_and_compiled_code_takes_torch_s_operations():
    norm, conv, x = RMSNorm(8).double(), ShortConvolution(8).double(), draw(2, 5, 8)
    torch.testing.assert_close(torch.func.vmap(rows.swiglu)(x, 2 * x), functional.silu(x) * 2 * x)
    assert rows.causal_conv(torch.empty(2, 5, 8, device="meta"), conv.weight[:, 0], None, None, None, True) is None
    torch.testing.assert_close(torch.func.vmap(norm)(x), norm(x))
    y, tangent = torch.func.jvp(lambda x: conv(x)[0], (x.detach(),), (x.detach(),))
    torch.testing.assert_close(y, conv(x)[0])
    assert tangent.shape == x.shape
    compiled = torch.compile(lambda x: norm(conv(x)[0]), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), norm(conv(x)[0]))


def test_a_nan_stays_in_its_row_and_window():
    x = draw(1, 40, 16).detach()
    x[0, 20, 3] = float("nan")
    bad = rows.rms_norm(x, torch.ones(16, dtype=torch.float64), 1e-6).isnan()
    assert bad[0, 20].all() and bad.sum() == 16
    bad = rows.causal_conv(x, torch.ones(16, 4, dtype=torch.float64), None, None, None, True).isnan()
    assert bad[0, 20:24, 3].all() and bad.sum() == 4


def test_the_kernels_can_be_switched_off():
    x = draw(3, 9)
    with rows.without_kernels():
        assert rows.l2_norm(x, 1e-6) is None
    assert rows.l2_norm(x, 1e-6) is not None


def uses_onednn(y):
    return type(y.grad_fn).__name__ == "_LinearBackward"


@pytest.mark.usefixtures("onednn_products")
@pytest.mark.parametrize("shape", [(6,), (1, 1), (3, 5), (37, 64), (2, 70, 3, 24), (130, 16)], ids=str)
def test_products_by_onednn_are_torch_s(shape):
    x, weight = draw(*shape, dtype=torch.float32), draw(33, shape[-1], dtype=torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = rows.linear(x, weight)
    assert uses_onednn(y)
    compare(y, (x, weight), functional.linear(*exact), exact, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(rows.linear(x, weight), y)
    for view in (
        torch.randn(shape[-1], 7).T,
        torch.randn(7, 1).expand(7, shape[-1]),
        torch.randn(14, 2 * shape[-1])[::2, ::2],
    ):
        torch.testing.assert_close(rows.linear(view, weight), functional.linear(view, weight))
    found, wanted = (torch.autograd.grad(f(x, weight).sum(), (x, weight)) for f in (rows.linear, functional.linear))
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("onednn_products")
def test_products_by_onednn_can_be_differentiated_twice():
    x, weight = draw(7, 12, dtype=torch.float32), draw(9, 12, dtype=torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]

    def second(y, inputs):
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    y = rows.linear(x, weight)
    assert uses_onednn(y)
    for found, wanted in zip(second(y, (x, weight)), second(functional.linear(*exact), exact), strict=True):
        assert (found - wanted).abs().max() <= 32 * ROUNDING[torch.float32] * wanted.abs().max()


@pytest.mark.usefixtures("onednn_products")
def test_products_leave_other_dtypes_transforms_and_autocast_to_torch():
    x, weight = draw(7, 12, dtype=torch.float32), draw(9, 12, dtype=torch.float32)
    assert not uses_onednn(rows.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert rows.linear(x, weight).dtype == torch.bfloat16
    batched = torch.func.vmap(rows.linear, in_dims=(0, None))(x.detach(), weight.detach())
    torch.testing.assert_close(batched, functional.linear(x, weight).detach())
    compiled = torch.compile(rows.linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), functional.linear(x, weight))
    with pytest.raises(RuntimeError, match="shapes"):
        rows.linear(x, weight[:, 1:])


@pytest.mark.usefixtures("onednn_products")
def test_small_products_and_other_cpus_stay_with_torch(monkeypatch):
    x, weight = draw(64, 64, dtype=torch.float32), draw(64, 64, dtype=torch.float32)
    assert uses_onednn(rows.linear(x, weight))
    monkeypatch.setattr(rows, "_SMALL_PRODUCT", 64**3 + 1)
    assert not uses_onednn(rows.linear(x, weight))
    monkeypatch.setattr(rows, "_SMALL_PRODUCT", 0)
    monkeypatch.setattr(rows, "onednn_is_faster", lambda: False)
    assert not uses_onednn(rows.linear(x, weight))


def test_a_cpu_held_to_another_instruction_set_keeps_torch_s_products(simd):
    assert simd == "avx512" or not rows.onednn_is_faster()
