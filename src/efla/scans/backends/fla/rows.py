"""Rows times scalars and squared norms of rows, in one pass each, with gradients.

Eager torch takes several passes, for Gated EFLA a third of a training step's memory traffic. Imports triton.
"""

# Kernels are compiled by Triton, which has its own types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from efla.scans.keys import L2_EPSILON


def scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """factor x, multiplied in float32 and rounded once to x's dtype: x [..., D], factor [...] float32."""
    scaled: Tensor = _ScaleRows.apply(x, factor)
    return scaled


def squared_norm(x: Tensor) -> Tensor:
    """x.x over the last axis: x [..., D] in, [...] out, added up in float32 and returned in float64 for its gradient."""
    lam: Tensor = _SquaredNorm.apply(x)
    return lam


def l2_normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / sqrt(x.x + 1e-6) in x's dtype, and the squared norm it has before it is rounded to that."""
    lam = squared_norm(x)
    inverse = torch.rsqrt(lam + L2_EPSILON)
    return scale_rows(x, inverse.float()), lam * inverse.square()


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor) -> Tensor:
        x, factor = x.contiguous(), factor.contiguous()
        ctx.save_for_backward(x, factor)
        return _scale(x, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, factor = ctx.saved_tensors
        grad = grad.contiguous()
        d_x, d_factor = torch.empty_like(x), torch.empty_like(factor)
        grid, sizes = _launch(x)
        scale_backward_kernel[grid](x, factor, grad, d_x, d_factor, x.numel() // x.shape[-1], **sizes)
        return d_x, d_factor


class _SquaredNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        lam = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        grid, sizes = _launch(x)
        squared_norm_kernel[grid](x, lam, lam.numel(), **sizes)
        ctx.save_for_backward(x, lam)
        return lam.double()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        """2 lam' x as (2 lam' |x|) (x / |x|): lam' alone leaves float32's range long before the product does."""
        x, lam = ctx.saved_tensors
        norm = torch.where(lam > 0, lam, 1).double().sqrt()
        return _scale(x, norm.reciprocal().float(), (2 * grad * norm).float())


def _scale(x: Tensor, factor: Tensor, second: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x)
    grid, sizes = _launch(x)
    scale_kernel[grid](x, factor, factor if second is None else second, y, factor.numel(), second is not None, **sizes)
    return y


def _launch(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and blocks of whole rows with about 4096 entries."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    block_rows = max(1, 4096 // block)
    rows = x.numel() // width
    return (triton.cdiv(rows, block_rows),), {"D": width, "BLOCK_ROWS": block_rows, "BLOCK_D": block}


@triton.jit(do_not_specialize=["rows"])
def scale_kernel(
    x,
    factor,
    second,
    y,
    rows,
    HAS_SECOND: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y = (factor x) second"""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    scaled = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scaled = scaled * tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
    if HAS_SECOND:
        scaled = scaled * tl.load(second + row, mask=row < rows, other=0.0)[:, None]
    tl.store(y + place, scaled.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def scale_backward_kernel(
    x,
    factor,
    grad,
    d_x,
    d_factor,
    rows,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """d_x = factor grad,  d_factor = x.grad"""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    b_grad = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    b_factor = tl.load(factor + row, mask=row < rows, other=0.0)
    tl.store(d_x + place, (b_factor[:, None] * b_grad).to(d_x.dtype.element_ty), mask=mask)
    tl.store(d_factor + row, tl.sum(b_x * b_grad, 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def squared_norm_kernel(
    x,
    lam,
    rows,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """lam = x.x"""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    b_x = tl.load(x + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(lam + row, tl.sum(b_x * b_x, 1), mask=row < rows)
