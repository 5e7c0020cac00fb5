"""Depthwise causal convolution over a few tokens, with a state, with padding and with packed sequences.

Shapes: B batch, T tokens, D channels, W kernel width, N packed sequences.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from efla.errors import unknown_name
from efla.native import rows
from efla.scans.validation import has_values

# Up to this many tokens, a sum of W shifted products is faster than torch's convolution.
_FEW_TOKENS = 8


class SequenceNeighbours(Protocol):
    """Ranks that hold the other parts of each sequence; :mod:`efla.train.sequence` implements it."""

    active: bool

    def halo(self, x: Tensor, width: int) -> Tensor:
        """The last ``width`` tokens of the rank before, [B, D, width], from this rank's x [B, T, D]."""

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """:func:`efla.linear_attention` over the whole sequence, of which the arguments are this rank's part."""


class ShortConvolution(nn.Module):
    """Each channel is convolved with its own few last values, then SiLU.

        y_t = silu( bias + sum_i weight[:, i] * x_{t - W + 1 + i} ),      x = 0 before the start

    x, y: [B, T, D]. ``state`` [B, D, W - 1] holds the last W - 1 inputs, oldest first, which precede the first token.
    A padded token (``mask`` [B, T] false) is skipped as if it were absent; its own output is meaningless.
    ``cu_seqlens`` [N + 1] are boundaries of sequences in the flattened [B * T] axis; no window crosses one.
    """

    def __init__(
        self, num_channels: int, kernel_size: int = 4, *, bias: bool = False, activation: str | None = "silu"
    ) -> None:
        super().__init__()
        if kernel_size < 2:
            raise ValueError(f"kernel_size must be at least 2, got {kernel_size}; leave the convolution out instead")
        if activation not in (None, "silu"):
            raise unknown_name("activation", activation, ["silu"])
        self.num_channels = num_channels
        self.kernel_size = kernel_size
        self.activation = activation
        self.sequence: SequenceNeighbours | None = None
        self.weight = nn.Parameter(torch.empty(num_channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.zeros(num_channels)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, init: str = "default", std: float = 0.02) -> None:
        """``default``: uniform within ±1/sqrt(W), as torch's Conv1d; ``normal``: normal(0, std). Bias 0."""
        if init == "default":
            bound = self.kernel_size**-0.5
            nn.init.uniform_(self.weight, -bound, bound)
        elif init == "normal":
            nn.init.normal_(self.weight, 0.0, std)
        else:
            raise unknown_name("convolution initialisation", init, ["default", "normal"])
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        *,
        state: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_shapes(x, state, mask)
        if self.sequence is not None and self.sequence.active:
            if state is not None or output_state or mask is not None or cu_seqlens is not None:
                raise ValueError("a sequence split over ranks takes no state, no padding and no packing (cu_seqlens)")
            state = self.sequence.halo(x, self.kernel_size - 1)
        if cu_seqlens is not None:
            if state is not None or output_state or mask is not None:
                raise ValueError("packed sequences (cu_seqlens) take neither a state nor a padding mask; pad or pack")
            arguments = x.reshape(1, -1, x.shape[-1]), self.weight[:, 0], self.bias, None, cu_seqlens, self._silu
            y = rows.causal_conv(*arguments)
            return (rows.torch_conv(*arguments, dtype=x.dtype) if y is None else y).view_as(x), None
        if mask is not None and state is None and _is_left_padding(mask):
            # A sequence is preceded by zeros anyway.
            x = x.masked_fill(~mask.bool()[..., None], 0)
            mask = None
        order = None if mask is None else _real_tokens_first(mask)
        if order is not None:
            x = _reorder(x, order)
        y = rows.causal_conv(x, self.weight[:, 0], self.bias, state, None, self._silu)
        new_state = None
        if y is None or output_state:
            width = self.kernel_size - 1
            past = x.new_zeros(x.shape[0], width, x.shape[2]) if state is None else state.transpose(1, 2).to(x.dtype)
            if y is None:
                y = self._convolve(torch.cat([past, x], dim=1))
                y = functional.silu(y) if self._silu else y
            new_state = _last_inputs(past, x, mask).transpose(1, 2) if output_state else None
        if order is not None:
            y = _reorder(y, order.argsort(dim=1))
        return y, new_state

    def _check_shapes(self, x: Tensor, state: Tensor | None, mask: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.num_channels:
            raise ValueError(f"x must have shape [B, T, {self.num_channels}], got {list(x.shape)}")
        expected = (x.shape[0], self.num_channels, self.kernel_size - 1)
        if state is not None and state.shape != expected:
            raise ValueError(f"state must have shape [B, D, W - 1] = {list(expected)}, got {list(state.shape)}")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"mask must have shape [B, T] = {list(x.shape[:2])}, got {list(mask.shape)}")

    def _convolve(self, window: Tensor) -> Tensor:
        """[B, W - 1 + T, D] -> [B, T, D]."""
        length = window.shape[1] - self.kernel_size + 1
        weight = self.weight.to(window.dtype)
        bias = None if self.bias is None else self.bias.to(window.dtype)
        if not _is_known(length <= _FEW_TOKENS):
            return functional.conv1d(window.transpose(1, 2), weight, bias, groups=self.num_channels).transpose(1, 2)
        y = window[:, :length] * weight[:, 0, 0]
        for i in range(1, self.kernel_size):
            y = torch.addcmul(y, window[:, i : i + length], weight[:, 0, i])
        return y if bias is None else y + bias

    @property
    def _silu(self) -> bool:
        return self.activation == "silu"

    def extra_repr(self) -> str:
        return f"{self.num_channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"


def _real_tokens_first(mask: Tensor) -> Tensor:
    """Order [B, T] that moves each row's padding behind its real tokens and is otherwise stable."""
    return torch.argsort((~mask.bool()).to(torch.int8), dim=1, stable=True)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def _is_known(condition: bool) -> bool:
    """Whether a condition on a length holds; false for a symbolic length, which must stay free in a traced graph."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _is_left_padding(mask: Tensor) -> bool:
    """Whether every row's padding [B, T] precedes its real tokens; checked on the CPU only, where it needs no synchronisation."""
    if not has_values(mask) or mask.device.type != "cpu":
        return False
    is_real = mask.bool()
    return bool((is_real[:, 1:] >= is_real[:, :-1]).all())


def _last_inputs(past: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """The W - 1 inputs [B, W - 1, D] before the next token: of ``past`` [B, W - 1, D] and then x [B, T, D].

    With a mask, x has each row's real tokens first, and the inputs are those of the row's own last real token.
    """
    width = past.shape[1]
    if mask is None:
        recent = x[:, -width:] if _is_known(x.shape[1] >= width) else x
        return torch.cat([past, recent], dim=1)[:, -width:]
    index = mask.sum(dim=1, keepdim=True) + torch.arange(width, device=mask.device)  # counted from the start of past
    return _reorder(torch.cat([past, x], dim=1), index)
