"""phi1 and the flow integrals built on it, accurate for small and for stiff exponents.

    phi1(x) = (1 - exp(-x)) / x = integral_0^1 exp(-x s) ds,        phi1(0) = 1

Naively differentiating ``-expm1(-x) / x`` loses every digit near zero, so phi1 is one member of a family that is closed
under differentiation, the exponential moments

    m_n(x) = integral_0^1 s^n exp(-x s) ds,     m_0 = phi1,     d m_n / dx = -m_{n+1},

each evaluated without cancellation. Derivatives of every order are therefore as accurate as the values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Below this argument the moments are summed as a series of positive terms; above it the upward recurrence is stable.
_SERIES_LIMIT = 2.0
_SERIES_TERMS = {torch.float32: 16, torch.float64: 28}


def phi1(x: Tensor) -> Tensor:
    """Mean of exp(-x s) over the unit interval: phi1(x) = (1 - exp(-x)) / x, elementwise, for x >= 0.

    Half-precision inputs are widened to float32; float64 stays float64. Differentiable to any order.
    """
    return _moment(x if x.dtype in _SERIES_TERMS else x.float(), 0)


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken. torch's custom operators have none and silently return zero."""
    return forward_ad._current_level >= 0


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 for x <= 0 with derivative exp(x); torch's own derivative, expm1(x) + 1, is zero where exp(x) is small."""
    exponential = x.exp()
    return torch.expm1(x).detach() + (exponential - exponential.detach())


def flow_integral(beta: Tensor, rate: Tensor, offset: Tensor | None = None) -> Tensor:
    """Weight that one token's write receives from an exact flow: beta * phi1(offset + beta * rate), elementwise.

        integral_0^1 beta exp(-(offset + beta rate) s) ds,        beta, rate, offset >= 0

    For beta * rate > 1 it is evaluated as (1 - exp(-eta)) / (offset / beta + rate), which stays right when
    beta * rate overflows, and tends to 1 / rate.
    """
    stiffness = beta * rate
    exponent = stiffness if offset is None else offset + stiffness
    is_stiff = stiffness > 1
    one = torch.ones_like(stiffness)
    gentle = beta * phi1(torch.where(is_stiff, one, exponent))
    denominator = torch.where(is_stiff, rate, one)
    if offset is not None:
        denominator = denominator + offset / torch.where(is_stiff, beta, one)
    return torch.where(is_stiff, -expm1(-exponent) / denominator, gentle)


def rational_step(beta: Tensor, rate: Tensor) -> Tensor:
    """The implicit counterpart of :func:`flow_integral`: beta / (1 + beta * rate), right when beta * rate overflows."""
    stiffness = beta * rate
    is_stiff = stiffness > 1
    one = torch.ones_like(stiffness)
    gentle = beta / (1 + torch.where(is_stiff, one, stiffness))
    stiff = 1 / (1 / torch.where(is_stiff, beta, one) + torch.where(is_stiff, rate, one))
    return torch.where(is_stiff, stiff, gentle)


def _moment(x: Tensor, n: int) -> Tensor:
    """m_n(x), differentiable in both modes."""
    if forward_mode():
        result: Tensor = _DualMoment.apply(x, n)  # type: ignore[no-untyped-call]
        return result
    return _exponential_moment(x, n)


@torch.library.custom_op("efla::exponential_moment", mutates_args=())
def _exponential_moment(x: Tensor, n: int) -> Tensor:
    """m_n(x); its derivative is -m_{n+1}(x), the same operator again. An operator so that torch.compile takes it whole."""
    return _moment_value(x, n)


@_exponential_moment.register_fake
def _(x: Tensor, n: int) -> Tensor:
    return torch.empty_like(x)


def _save_argument(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.n = inputs
    ctx.save_for_backward(x)
    ctx.save_for_forward(x)


def _moment_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return -grad * _moment(x, ctx.n + 1), None


class _DualMoment(torch.autograd.Function):
    """The same for forward mode, which an operator does not have."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save_argument)
    backward = staticmethod(_moment_backward)  # type: ignore[assignment]

    @staticmethod
    def forward(x: Tensor, n: int) -> Tensor:  # type: ignore[override]
        return _moment_value(x, n)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # type: ignore[override]
        return _moment_backward(ctx, tangent)[0]


_exponential_moment.register_autograd(_moment_backward, setup_context=_save_argument)


def _moment_value(x: Tensor, n: int) -> Tensor:
    value = torch.where(x == 0, torch.ones_like(x), -torch.expm1(-x) / torch.where(x == 0, torch.ones_like(x), x))
    if n == 0:
        return value
    # m_n = (n m_{n-1} - exp(-x)) / x loses digits near zero, where instead
    # m_n = exp(-x) / (n+1) * (1 + x/(n+2) * (1 + x/(n+3) * (1 + ...))): positive terms only.
    is_small = x < _SERIES_LIMIT
    large = torch.where(is_small, torch.full_like(x, _SERIES_LIMIT), x)
    value = -torch.expm1(-large) / large
    for order in range(1, n + 1):
        value = (order * value - torch.exp(-large)) / large
    small = torch.where(is_small, x, torch.zeros_like(x))
    series = torch.ones_like(x)
    for term in range(_SERIES_TERMS[x.dtype], 0, -1):
        series = 1 + small / (n + 1 + term) * series
    return torch.where(is_small, torch.exp(-small) / (n + 1) * series, value)
