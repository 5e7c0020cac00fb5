"""The norms, the short convolution and the gate around a scan: CPU kernels where they are faster, torch elsewhere.

In torch these take longer than the native scan, because each is a chain of passes over memory. The kernels make one pass
forward and one backward, and save only the inputs. Compiled, traced or transformed code, other devices, second derivatives,
and small tensors with gradients use torch's operations. Large products of float32 are torch's, by the faster of its
two libraries.

Shapes: R rows of width D; B batch, T tokens, C channels, W kernel width, N packed sequences.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from efla.native import DTYPES, kernels, materialize
from efla.phi import forward_mode

_SMALL = 8192  # with fewer elements and gradients, torch's own operations are as fast
_SMALL_PRODUCT = 2**22  # with fewer multiplications, preparing the call takes longer than it saves
_MAX_CONV_WIDTH = 16
MAX_PRODUCT_ROWS = 16  # with more rows, torch's matrix product is as fast
_SMALLER_WEIGHTS = {(torch.float32, torch.float16), (torch.float32, torch.int8)}
_HAS_MKL_AND_ONEDNN = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
_switched_off = ContextVar("row_kernels_switched_off", default=False)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use torch's own operations inside this context, to measure what the kernels save."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def rms_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, times silu(gate) if given; x, gate: [..., D], weight: [D]."""
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"x must have rows of width {weight.shape[0]}, as the norm's weight, got {list(x.shape)}")
    fits = gate is None or (gate.shape == x.shape and gate.dtype == x.dtype)
    if fits and not torch.is_grad_enabled() and kernels_take(x, weight, gate):
        return _norm_forward(x, weight, gate, 1 / x.shape[-1], eps)
    if not fits or not _kernels_take(x, weight, gate):
        wide = wider(x)
        y = functional.rms_norm(x.to(wide), (x.shape[-1],), weight.to(wide), eps)
        return (y if gate is None else y * functional.silu(gate.to(wide))).to(x.dtype)
    return _apply(_Norm, x, weight, gate, 1 / x.shape[-1], eps)


def l2_norm(x: Tensor, eps: float) -> Tensor | None:
    """x / sqrt(x.x + eps) over the last axis, or ``None`` where the kernels do not apply; x: [..., D]."""
    return _apply(_Norm, x, None, None, 1.0, eps) if _kernels_take(x) else None


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor | None:
    """y_t = act( bias + sum_i weight[:, i] x_{t-W+1+i} ), or ``None`` where the kernels do not apply.

    x, y: [B, T, C]; weight: [C, W]; bias: [C]; past: [N, C, W - 1], the inputs before the first; cu_seqlens: [N + 1], B = 1.
    """
    if not _kernels_take(x, weight, bias, past) or weight.shape[1] > _MAX_CONV_WIDTH:
        return None
    return _apply(_Conv, x, weight, bias, past, cu_seqlens, silu)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element; gate, up: [..., D]."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        return _torch_swiglu(gate, up)
    if not torch.is_grad_enabled() and kernels_take(gate, up):
        y = torch.empty(gate.shape, dtype=gate.dtype)
        kernels.gate_forward(_flat(gate), _flat(up), y.view(-1), torch.get_num_threads())
        return y
    if not _kernels_take(gate, up):
        return _torch_swiglu(gate, up)
    return _apply(_Gate, gate, up)


def products(x: Tensor, weights: Sequence[Tensor], *, gated: bool = False) -> list[Tensor] | None:
    """x W^T for each weight W, for inference on a few rows, or ``None`` where the kernel does not apply or torch is as fast.

    gated: the only result is silu(x W0^T) * (x W1^T). x: [..., D]; weights: [C, D]; results: [..., C]. With float32 x, weights
    may be float16, or int8 [C, D + 4] as :class:`efla.layers.linear.PackedLinear` stores them.

    The kernel reads all weights in one call. Its results do not depend on the number of rows.
    """
    width = x.shape[-1]
    if (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or not kernels_take(x, *weights)
        or not 0 < x.numel() <= MAX_PRODUCT_ROWS * width
        or any(w.dtype != x.dtype and (x.dtype, w.dtype) not in _SMALLER_WEIGHTS for w in weights)
        or any(not w.is_contiguous() or w.is_neg() for w in weights)
    ):
        return None
    flat = _rows(x)
    results = [flat.new_empty(flat.shape[0], w.shape[0]) for w in weights[: 1 if gated else None]]
    kernels.products(flat, weights, results, gated, torch.get_num_threads())
    return [y.view(*x.shape[:-1], y.shape[1]) for y in results]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T; x: [..., D]; weight: [C, D]; result: [..., C].

    In float32 torch calls MKL, which leaves AVX-512 unused on AMD's CPUs. oneDNN, which is part of torch too, does not: its
    products and their gradients take half the time on Zen 5.
    """
    if not onednn_is_faster() or not _onednn_takes(x, weight):
        return functional.linear(x, weight)
    has_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _apply(_Linear, x, weight) if has_gradients else _onednn(x, weight)


def onednn_is_faster() -> bool:
    """Whether large products of float32 are faster by oneDNN than by torch's own choice on this CPU; not in compiled code."""
    if torch.compiler.is_compiling() or kernels is None:
        return False
    return _HAS_MKL_AND_ONEDNN and bool(kernels.mkl_misses_avx512())


def _onednn_takes(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.shape[-1] == weight.shape[1]
        and x.numel() * weight.shape[0] >= _SMALL_PRODUCT
        and weight.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and kernels_take(x, weight)
    )


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    rows = materialize(x).reshape(-1, x.shape[-1])
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, materialize(weight), None, "none", [], "")
    return y.view(*x.shape[:-1], weight.shape[0])


def wider(x: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or x's dtype if that is wider."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.promote_types(x.dtype, torch.float32)


def is_plain_tensor(x: object) -> bool:
    """Whether x is a tensor of no other class, which might compute in its own way."""
    return type(x) is nn.Parameter or type(x) is Tensor


def kernels_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels apply: built, plain CPU tensors, and no compiler, transform or tracer that must see the call."""
    return (
        kernels is not None
        and not torch.compiler.is_compiling()
        and not _switched_off.get()
        and x.device.type == "cpu"
        and x.dtype in DTYPES
        and is_plain_tensor(x)
        and all(t is None or is_plain_tensor(t) for t in others)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not forward_mode()
    )


def _kernels_take(x: Tensor, *others: Tensor | None) -> bool:
    return kernels_take(x, *others) and (x.numel() >= _SMALL or not torch.is_grad_enabled())


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _norm_forward(x: Tensor, weight: Tensor | None, gate: Tensor | None, factor: float, eps: float) -> Tensor:
    rows = _rows(x)
    y = torch.empty_like(rows)
    gates = None if gate is None else _rows(gate)
    kernels.norm_forward(rows, gain(weight, x), gates, y, factor, eps, torch.get_num_threads())
    return y.view(x.shape)


class _Linear(torch.autograd.Function):
    """x W^T. The gradients are products of the same kind, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        d_x = linear(grad, weight.t()) if wants_x else None
        if not wants_weight:
            return d_x, None
        columns, grad_columns = (t.reshape(-1, t.shape[-1]).t() for t in (x, grad))  # x may be [D]
        if len(columns) < len(grad_columns):  # oneDNN makes a dense copy of the first operand
            return d_x, linear(columns, grad_columns).t()
        return d_x, linear(grad_columns, columns)


class _Norm(torch.autograd.Function):
    """weight * x / sqrt(factor * sum(x^2) + eps), times silu(gate)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, factor: float, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.factor, ctx.eps = factor, eps
        return _norm_forward(x, weight, gate, factor, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: torch differentiates its own operations again
            return (*_torch_gradients(_torch_norm, (x, weight, gate), grad, ctx.factor, ctx.eps), None, None)
        rows, weights, gates = _rows(x), gain(weight, x), None if gate is None else _rows(gate)
        d_x, d_gate = torch.empty_like(rows), None if gates is None else torch.empty_like(gates)
        parts = None if weights is None else weights.new_empty(kernels.norm_parts(rows.shape[0]), rows.shape[1])
        kernels.norm_backward(
            rows, weights, gates, _rows(grad), d_x, d_gate, parts, ctx.factor, ctx.eps, torch.get_num_threads()
        )
        d_weight = None if parts is None else parts.sum(0).to(weight.dtype)
        return d_x.view(x.shape), d_weight, None if d_gate is None else d_gate.view(x.shape), None, None


class _Conv(torch.autograd.Function):
    """The depthwise causal convolution with its activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        past: Tensor | None,
        cu_seqlens: Tensor | None,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, past, cu_seqlens)
        ctx.silu = silu
        y = torch.empty(x.shape, dtype=x.dtype)
        kernels.conv_forward(*_conv_inputs(x, weight, bias, past, cu_seqlens), y, silu, torch.get_num_threads())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, past, cu_seqlens = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = (x, weight, bias, past)
            return (*_torch_gradients(torch_conv, inputs, grad, cu_seqlens, ctx.silu), None, None)
        call = _conv_inputs(x, weight, bias, past, cu_seqlens)
        d_x = torch.empty(x.shape, dtype=x.dtype)
        d_past = None if call.past is None else torch.zeros_like(call.past)  # [N, W - 1, C]
        num_sequences = x.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
        num_parts = kernels.conv_parts(call.cu_seqlens, num_sequences, x.shape[1])
        parts = call.weight.new_empty(num_parts, weight.shape[1] + 1, x.shape[2])
        grad = materialize(grad).contiguous()
        kernels.conv_backward(*call, grad, d_x, d_past, parts, ctx.silu, torch.get_num_threads())
        sums = parts.sum(0)
        return (
            d_x,
            sums[:-1].t().to(weight.dtype),
            None if bias is None else sums[-1].to(bias.dtype),
            None if d_past is None or past is None else d_past.transpose(1, 2).to(past.dtype),
            None,
            None,
        )


class _Gate(torch.autograd.Function):
    """silu(gate) * up; torch's own operations would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty(gate.numel(), dtype=gate.dtype)
        kernels.gate_forward(_flat(gate), _flat(up), y, torch.get_num_threads())
        return y.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(_torch_gradients(_torch_swiglu, (gate, up), grad))
        d_gate, d_up = (torch.empty(gate.numel(), dtype=gate.dtype) for _ in range(2))
        kernels.gate_backward(_flat(gate), _flat(up), _flat(grad), d_gate, d_up, torch.get_num_threads())
        return d_gate.view(gate.shape), d_up.view(gate.shape)


class _ConvInputs(NamedTuple):
    """What both directions pass to the kernels, in their layout."""

    x: Tensor  # [B, T, C]
    weight: Tensor  # [W, C]
    bias: Tensor | None  # [C]
    past: Tensor | None  # [N, W - 1, C]
    cu_seqlens: Tensor | None  # [N + 1]


def _conv_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, cu_seqlens: Tensor | None
) -> _ConvInputs:
    wide, x = wider(x), materialize(x)
    return _ConvInputs(
        x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous(),
        materialize(weight.to(wide)).t().contiguous(),
        None if bias is None else materialize(bias.to(wide)).contiguous(),
        None if past is None else materialize(past.to(wide)).transpose(1, 2).contiguous(),
        None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous(),
    )


def torch_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`causal_conv` as a sum of shifted products, on every device and differentiable any number of times.

    dtype: what is computed in, by default float32 or wider.
    """
    batch, length, _ = x.shape
    kernel = weight.shape[1]
    dtype = wider(x) if dtype is None else dtype
    wide, weight = x.to(dtype), weight.to(dtype)
    if cu_seqlens is None:
        sequence = torch.arange(batch, device=x.device)[:, None]
        position = torch.arange(length, device=x.device)[None]
    else:
        sequence, position = (index[None] for index in _sequence_and_position(cu_seqlens, length))
    y = wide * weight[:, -1]
    for shift in range(1, kernel):
        source = functional.pad(wide, (0, 0, shift, 0))[:, :length]
        outside = (position < shift)[..., None]
        if past is None:
            source = source.masked_fill(outside, 0)
        else:
            before = past.to(dtype).transpose(1, 2)[sequence, (position - shift).clamp(max=-1) + kernel - 1]
            source = torch.where(outside, before, source)
        y = torch.addcmul(y, source, weight[:, -1 - shift])
    y = y if bias is None else y + bias.to(dtype)
    return (functional.silu(y) if silu else y).to(x.dtype)


def position_in_sequence(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """How many tokens of the same packed sequence come before each token: [num_tokens]."""
    return _sequence_and_position(cu_seqlens, num_tokens)[1]


def _sequence_and_position(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Each token's packed sequence and its position there, both [num_tokens]."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    starts = cu_seqlens.to(tokens.dtype)
    # The last boundary at or before a token is the start of its sequence; empty sequences share a boundary.
    sequence = torch.searchsorted(starts, tokens, right=True) - 1
    return sequence, tokens - starts[sequence]


def _torch_norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, factor: float, eps: float) -> Tensor:
    wide = x.to(wider(x))
    unit = wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) * factor + eps)
    y = unit if weight is None else unit * weight.to(unit.dtype)
    return (y if gate is None else y * functional.silu(gate.to(unit.dtype))).to(x.dtype)


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _torch_gradients(function: Any, inputs: tuple[Tensor | None, ...], grad: Tensor, *rest: Any) -> list[Tensor | None]:
    """Gradients that can be differentiated again, from torch's own formula of the same function."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs, *rest), wanted, grad, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def gain(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """A norm's weight as its kernel takes it, for rows x."""
    if weight is None:
        return None
    wide = wider(x)
    return materialize(weight if weight.dtype == wide else weight.to(wide)).contiguous()


def _rows(x: Tensor) -> Tensor:
    """[..., D] as dense rows [R, D]."""
    return materialize(x).contiguous().view(-1, x.shape[-1])


def _flat(x: Tensor) -> Tensor:
    return materialize(x).contiguous().view(-1)
