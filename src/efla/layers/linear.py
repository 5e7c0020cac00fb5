"""Linear maps: several of the same few rows in one kernel call, and with smaller weights."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from efla.native import rows


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module runs the forward of ``kind`` and nothing else: no subclass, no hook."""
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or _has_any_global_hook()
    )


class PackedLinear(nn.Module):
    """y = x W^T + b with W in float16, or in int8 with one scale for each output; x, y: [..., size].

    Only the weights are rounded. A few rows are multiplied by our kernel, more rows by torch with the weights widened to
    float32 for the call: 8-bit products would also round x, and a prompt would then cost accuracy that its tokens do not.
    """

    weight: Tensor
    """float16 [O, D], or int8 [O, D + 4]: the numbers of an output, then the bytes of their float32 scale."""
    is_tied = False
    """Whether the weights are also a parameter of the model, the embedding's."""

    def __init__(self, linear: nn.Linear, weights: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weights = linear.in_features, linear.out_features, weights
        weight = linear.weight.detach().float()
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        stored = weight.half() if weights == "float16" else weight
        if not stored.isfinite().all():
            raise ValueError(f"cannot store weights that are not finite as {weights}")
        if weights == "float16":
            self.weight = stored
            return
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.weight = torch.cat([(weight / scales).round().to(torch.int8), scales.view(torch.int8)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise RuntimeError(f"{self.weights} weights have no backward pass; load the model without them to train")
        wide = x.float()
        few = rows.products(wide, [self.weight])
        y = self._widened_products(wide) if few is None else few[0]
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """Stays as it is: its weights have a dtype of their own, and kernels for the CPU only."""
        if fn(self.weight[:0]).device != self.weight.device:
            raise RuntimeError(f"{self.weights} weights stay on the CPU; load the model without them to move it")
        return super()._apply(fn, recurse)

    def _widened_products(self, x: Tensor) -> Tensor:
        if self.weights == "float16":
            return rows.linear(x, self.weight.float())
        numbers, scales = self.weight.split([self.in_features, 4], dim=1)
        return rows.linear(x, numbers.float()).mul_(scales.contiguous().view(torch.float32).T)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.weights}"


def plain_weights(linears: Sequence[nn.Module | None], dtype: torch.dtype) -> list[Tensor | None] | None:
    """The weights of plain linear maps without biases for rows of a dtype, as :func:`efla.native.rows.products` takes them.

    ``None`` for ``None``; or ``None`` instead of a list if one is anything else.
    """
    weights: list[Tensor | None] = []
    weight: Tensor | None
    bias: Tensor | None
    for linear in linears:
        if linear is None:
            weights.append(None)
            continue
        if is_plain(linear, nn.Linear):
            weight, bias = linear._parameters["weight"], linear._parameters["bias"]  # attributes of a module are slow
            fits = weight is not None and weight.dtype == dtype
        elif is_plain(linear, PackedLinear):
            packed = cast(PackedLinear, linear)
            weight, bias, fits = packed.weight, packed.bias, dtype == torch.float32
        else:
            return None
        if not fits or bias is not None or not rows.is_plain_tensor(weight):
            return None
        weights.append(weight)
    return weights


def apply_linears(x: Tensor, linears: Sequence[nn.Module | None]) -> tuple[Tensor | None, ...]:
    """linear(x) for each, and ``None`` for ``None``; all in one kernel where x is a few rows in inference.

    Modules that are not plain linear maps (adapters, maps quantised by others, with hooks or biases) are called themselves.
    """
    weights = plain_weights(linears, x.dtype)
    results = None if weights is None else rows.products(x, [w for w in weights if w is not None])
    if results is None:
        return tuple(None if linear is None else _apply_alone(x, linear) for linear in linears)
    found = iter(results)
    return tuple(None if linear is None else next(found) for linear in linears)


def _apply_alone(x: Tensor, linear: nn.Module) -> Tensor:
    """linear(x), by the faster of torch's libraries if that is a plain product."""
    weights = plain_weights((linear,), x.dtype) if rows.onednn_is_faster() else None
    weight = None if weights is None else weights[0]
    return cast(Tensor, linear(x)) if weight is None or weight.dtype != x.dtype else rows.linear(x, weight)


def apply_linear(x: Tensor, linear: nn.Module) -> Tensor:
    """linear(x), by :func:`apply_linears`."""
    return cast(Tensor, apply_linears(x, (linear,))[0])
