"""What every block has beside its mixer: RMSNorm and the SwiGLU feed-forward layer."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from efla.native import rows


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module runs the forward of ``kind`` and nothing else: no subclass, no hook."""
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
    )


def plain_weights(linears: Sequence[nn.Module | None]) -> list[Tensor | None] | None:
    """The weights of plain linear maps without biases, ``None`` for ``None``; or ``None`` if one is anything else."""
    weights: list[Tensor | None] = []
    for linear in linears:
        parameters = {} if linear is None else linear._parameters  # attributes of a module are slow
        weight = parameters.get("weight")
        if linear is not None and not (
            is_plain(linear, nn.Linear) and rows.is_plain_tensor(weight) and parameters["bias"] is None
        ):
            return None
        weights.append(weight)
    return weights


def apply_linears(x: Tensor, linears: Sequence[nn.Module | None]) -> tuple[Tensor | None, ...]:
    """linear(x) for each, and ``None`` for ``None``; all in one kernel where x is a few rows in inference.

    Modules that are not plain linear maps (adapters, quantised ones, with hooks or biases) are called themselves.
    """
    weights = plain_weights(linears)
    results = None if weights is None else rows.products(x, [w for w in weights if w is not None])
    found = iter([linear(x) for linear in linears if linear is not None] if results is None else results)
    return tuple(None if linear is None else next(found) for linear in linears)


def apply_linear(x: Tensor, linear: nn.Module) -> Tensor:
    """linear(x), by :func:`apply_linears`."""
    return cast(Tensor, apply_linears(x, (linear,))[0])


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis.

        y = gain * x / sqrt(mean(x^2) + eps)

    x, y: [..., size], any floating dtype; the statistics and the product are float32 or wider.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rows.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class SwiGLU(nn.Module):
    """Gated feed-forward layer without biases.

        y = Wd( silu(Wg x) * (Wu x) )

    x, y: [..., hidden_size]; the inner width is ``intermediate_size``.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = plain_weights((self.gate_proj, self.up_proj))
        gated = None if weights is None else rows.products(x, cast(list[Tensor], weights), gated=True)
        inner = rows.swiglu(self.gate_proj(x), self.up_proj(x)) if gated is None else gated[0]
        return apply_linear(inner, self.down_proj)


def swiglu_width(hidden_size: int, multiple_of: int = 256) -> int:
    """The usual inner width, 8/3 of the hidden size rounded up: multiple * ceil(floor(hidden * 4 * 2/3) / multiple)."""
    return multiple_of * -(-(hidden_size * 4 * 2 // 3) // multiple_of)
