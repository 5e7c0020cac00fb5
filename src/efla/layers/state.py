"""What a recurrent mixer carries from one call to the next."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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


class SequenceNeighbours(Protocol):
    """Ranks that hold the other parts of each sequence; see :mod:`efla.distributed.sequence`."""

    active: bool

    def halo(self, x: Tensor, width: int) -> Tensor:
        """The last ``width`` tokens of the rank before, [B, D, width], from this rank's x [B, T, D]."""

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """:func:`efla.linear_attention` over the whole sequence, of which the arguments are this rank's part."""
