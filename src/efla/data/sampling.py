"""Rows of tokens to train on: token streams, and which rows each step takes.

The rows of a step are a pure function of (seed, step, rank, world), so there is no sampler state to save. A step takes
the rows numbered step * rows to (step + 1) * rows - 1 for any number of ranks; each rank takes an equal share, in order.
The seed and a row's number determine where the row starts:

    uniform    offset = hash(seed, number) mod (tokens - length + 1)               any offset, rows may overlap
    shuffled   offset = length * permutation(seed, pass)[number mod (tokens // length)]    every row once per pass

All arithmetic is on integers, so every machine and every version of numpy gives the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from efla.runs.records import Count, Minimum, check_fields

if TYPE_CHECKING:
    from torch import Tensor

Order = Literal["uniform", "shuffled"]
_ROUNDS = 6

Tokens = NDArray[Any]
"""One-dimensional and of an unsigned integer type."""


class TokenStream:
    """Arrays of tokens, in memory or mapped from disk, read as one sequence. Only what is read is copied."""

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
        """Tokens [start, stop) as int64."""
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
        """The stream of tokens [start, stop), without copying."""
        parts = []
        for part, first in zip(self.parts, self.starts, strict=False):
            low, high = max(start - int(first), 0), min(stop - int(first), len(part))
            if low < high:
                parts.append(part[low:high])
        return TokenStream(*parts)

    def rows(self, offsets: Sequence[int] | NDArray[np.int64], length: int) -> Tensor:
        """Rows [len(offsets), length] of tokens that start at the given offsets."""
        import torch

        out = np.empty((len(offsets), length), dtype=np.int64)
        for row, offset in zip(out, offsets, strict=True):
            row[:] = self.read(int(offset), int(offset) + length)
        return torch.from_numpy(out)


@dataclass(frozen=True)
class RowSampler:
    """The rows of every step: ``RowSampler(stream, length=512, rows=8, seed=42).batch(step, rank, world)``.

    rows: rows per step over all ranks. order: see the module.
    """

    stream: TokenStream
    length: Annotated[int, Minimum(2)]
    rows: Count
    seed: int
    order: Order = "uniform"

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.stream) < self.length:
            raise ValueError(
                f"the training text has {len(self.stream)} tokens, fewer than one row of {self.length}; "
                "give more text or a shorter length"
            )

    def numbers(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.uint64]:
        """Numbers of the rows that ``rank`` of ``world`` takes at ``step``."""
        if self.rows % world or not 0 <= rank < world:
            raise ValueError(
                f"{self.rows} rows per step cannot be shared evenly by {world} ranks (rank {rank}); "
                "use a number of rows that is a multiple of the number of ranks"
            )
        share = self.rows // world
        first = step * self.rows + rank * share
        return np.arange(first, first + share, dtype=np.uint64)

    def offsets(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Where these rows start in the stream."""
        numbers = self.numbers(step, rank, world)
        if self.order == "uniform":
            choices = np.uint64(len(self.stream) - self.length + 1)
            return (_hash(numbers, self.seed) % choices).astype(np.int64)
        per_pass = len(self.stream) // self.length
        passes, within = np.divmod(numbers, np.uint64(per_pass))
        out = np.empty(len(numbers), dtype=np.int64)
        for one in np.unique(passes):
            chosen = passes == one
            out[chosen] = permute(within[chosen], per_pass, self.seed, int(one)).astype(np.int64)
        return out * self.length

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """The rows [rows / world, length], int64."""
        return self.stream.rows(self.offsets(step, rank, world), self.length)


def consecutive_rows(stream: TokenStream, length: int, rows: int, limit: int | None = None) -> Iterator[Tensor]:
    """The stream's first ``limit`` tokens (default all) in consecutive rows, in batches [<= rows, length].

    The rest at the end is one shorter row, if it has a token to predict.
    """
    total = len(stream) if limit is None else min(limit, len(stream))
    full = total // length
    for first in range(0, full, rows):
        yield stream.rows([n * length for n in range(first, min(first + rows, full))], length)
    if total - full * length >= 2:
        yield stream.rows([full * length], total - full * length)


def document_boundaries(rows: Tensor, bos_token: int) -> Tensor:
    """The ``cu_seqlens`` [N + 1] of the documents in flattened rows [B, T]: where rows and documents start, and the end.

    A document starts with ``bos_token``.
    """
    import torch

    starts = rows == bos_token
    starts[:, 0] = True
    boundaries = starts.flatten().nonzero().flatten()
    return torch.cat([boundaries, boundaries.new_tensor([rows.numel()])]).to(torch.int32)


def permute(numbers: NDArray[np.uint64], count: int, seed: int, number_of_pass: int) -> NDArray[np.uint64]:
    """The values of a pseudo-random permutation of 0 .. count - 1 at ``numbers``, computed without storing it.

    A Feistel network on the smallest even number of bits that covers ``count``, applied again to values outside it.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _hash(np.arange(_ROUNDS, dtype=np.uint64), seed, 1 + number_of_pass)
    out = numbers.copy()
    pending = np.ones(len(out), dtype=bool)
    while pending.any():
        left, right = out[pending] >> half, out[pending] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        out[pending] = (left << half) | right
        pending = out >= count
    return out


def _hash(numbers: NDArray[np.uint64], *keys: int) -> NDArray[np.uint64]:
    """64 pseudo-random bits for each number under the keys."""
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for key in keys:
            state = _mix(np.array([state + np.uint64(key % 2**64)], dtype=np.uint64))[0]
        return _mix(numbers * np.uint64(0x9E3779B97F4A7C15) + state)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the result depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
