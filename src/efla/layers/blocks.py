"""What every block has beside its mixer: RMSNorm and the SwiGLU feed-forward layer."""

from typing import cast

import torch
from torch import Tensor, nn

from efla.layers.linear import apply_linear, apply_linears, plain_weights
from efla.native import rows


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
        weights = plain_weights((self.gate_proj, self.up_proj), x.dtype)
        gated = None if weights is None else rows.products(x, cast(list[Tensor], weights), gated=True)
        if gated is None:
            gate, up = apply_linears(x, (self.gate_proj, self.up_proj))
            inner = rows.swiglu(cast(Tensor, gate), cast(Tensor, up))
        else:
            inner = gated[0]
        return apply_linear(inner, self.down_proj)


def swiglu_width(hidden_size: int, multiple_of: int = 256) -> int:
    """The usual inner width, 8/3 of the hidden size rounded up: multiple * ceil(floor(hidden * 4 * 2/3) / multiple)."""
    return multiple_of * -(-(hidden_size * 4 * 2 // 3) // multiple_of)
