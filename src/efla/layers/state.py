"""What a recurrent mixer carries from one call to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MixerState(NamedTuple):
    """State of a mixer after some tokens; constant in their number.

    conv: [B, D, W - 1], the last inputs of the convolutions (``None`` without them); memory: [B, H, K, V], float32 or
    wider, S of the recurrence.
    """

    conv: Tensor | None
    memory: Tensor

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self if x is not None)
