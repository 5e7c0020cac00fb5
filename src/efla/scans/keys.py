"""Squared norms and L2 normalisation of keys, with gradients that are right for norms from 1e-18 to 1e18."""

import torch
from torch import Tensor

from efla.native import rows
from efla.phi import forward_mode

L2_EPSILON = 1e-6


def widest(x: Tensor) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def prepare_keys(q: Tensor, k: Tensor, normalise: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, of which those in ``normalise`` are L2-normalised in ``dtype``, and lam = k.k: [B, T, Hk]."""
    if "q" in normalise:
        q = l2_normalize(q.to(dtype))
    if "k" in normalise:
        k = l2_normalize(k.to(dtype))
    return q, k, squared_norm(k.to(dtype))


def squared_norm(k: Tensor) -> Tensor:
    """lam = k.k over the last axis, in the widest dtype: its gradient needs the range.

    k: [..., K] float32 or float64; returns [...]. The gradient 2 lam' k is formed as (2 lam' |k|) (k / |k|), since
    lam' alone leaves float32's range long before the product does.
    """
    return _sum_of_squares(k) if forward_mode() else _squared_norm_op(k)


def _sum_of_squares(k: Tensor) -> Tensor:
    return (k * k).sum(-1).to(widest(k), copy=True)


@torch.library.custom_op("efla::squared_norm", mutates_args=())
def _squared_norm_op(k: Tensor) -> Tensor:
    return _sum_of_squares(k)


@_squared_norm_op.register_fake
def _(k: Tensor) -> Tensor:
    return k.new_empty(k.shape[:-1], dtype=widest(k))


def _squared_norm_backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    k, lam = ctx.saved_tensors
    norm = torch.where(lam > 0, lam, 1).sqrt()
    return (2 * grad * norm).to(k.dtype)[..., None] * (k / norm.to(k.dtype)[..., None])


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(x.x + 1e-6) over the last axis, as flash-linear-attention does; x: [..., D], float32 or float64."""
    unit = rows.l2_norm(x, L2_EPSILON)
    if unit is not None:
        return unit
    return x * _inverse_norm(x) if forward_mode() else l2_normalize_op(x)


@torch.library.custom_op("efla::l2_normalize", mutates_args=())
def l2_normalize_op(x: Tensor) -> Tensor:
    """The same in torch's operations."""
    return x * _inverse_norm(x)


@l2_normalize_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _l2_normalize_backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    x, unit = ctx.saved_tensors
    return _inverse_norm(x) * (grad - unit * (unit * grad).sum(-1, keepdim=True))


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON)


def _save_input_and_output(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, output)


_squared_norm_op.register_autograd(_squared_norm_backward, setup_context=_save_input_and_output)
l2_normalize_op.register_autograd(_l2_normalize_backward, setup_context=_save_input_and_output)
