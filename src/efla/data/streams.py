"""A long run of tokens that rows are cut from: an array in memory, or arrays end to end as shards on disk are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[Any]
"""One-dimensional and of an unsigned integer type."""


class TokenStream:
    """Arrays of tokens read as if they stood end to end; nothing is copied but what is read."""

    def __init__(self, *parts: Tokens) -> None:
        for part in parts:
            if part.ndim != 1 or part.dtype.kind != "u":
                raise ValueError(
                    f"tokens must be one-dimensional and of an unsigned integer type, got {part.ndim} dimensions of {part.dtype}"
                )
        self.parts: Sequence[Tokens] = [part for part in parts if len(part)]
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop), across parts where need be."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of a stream of {len(self)}")
        out = np.empty(stop - start, dtype=np.int64)
        place = int(np.searchsorted(self.starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            offset = start + filled - int(self.starts[place])
            piece = self.parts[place][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            place += 1
        return out

    def slice(self, start: int, stop: int) -> TokenStream:
        """The stream of tokens [start, stop), still of the same arrays."""
        parts = []
        for part, first in zip(self.parts, self.starts, strict=False):
            low, high = max(start - int(first), 0), min(stop - int(first), len(part))
            if low < high:
                parts.append(part[low:high])
        return TokenStream(*parts)

    def rows(self, offsets: Sequence[int] | NDArray[np.int64], length: int) -> Tensor:
        """Rows [len(offsets), length] of tokens that start at the offsets given."""
        out = np.empty((len(offsets), length), dtype=np.int64)
        for row, offset in zip(out, offsets, strict=True):
            row[:] = self.read(int(offset), int(offset) + length)
        return torch.from_numpy(out)


def consecutive_rows(stream: TokenStream, length: int, rows: int, limit: int | None = None) -> Iterator[Tensor]:
    """The stream's first ``limit`` tokens (default all) in consecutive rows, in batches [<= rows, length].

    What is left over at the end comes as one shorter row, if it has a token to predict.
    """
    total = len(stream) if limit is None else min(limit, len(stream))
    full = total // length
    for first in range(0, full, rows):
        yield stream.rows([n * length for n in range(first, min(first + rows, full))], length)
    if total - full * length >= 2:
        yield stream.rows([full * length], total - full * length)


def document_borders(rows: Tensor, border: int) -> Tensor:
    """Borders [N + 1] of documents in the flattened rows [B, T]: where a row or a document starts, and the end.

    A document starts with the token ``border``. This is the ``cu_seqlens`` that resets the memory between documents.
    """
    starts = rows == border
    starts[:, 0] = True
    borders = starts.flatten().nonzero().flatten()
    return torch.cat([borders, borders.new_tensor([rows.numel()])]).to(torch.int32)
