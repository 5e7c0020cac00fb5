"""Which tokens are trained on at which step: a pure function of (seed, step, rank, world), with no state to lose.

A step takes the rows numbered step * rows to (step + 1) * rows - 1, whatever the number of ranks; each rank takes its
equal share of them, in order. A row's number and the seed alone say where the row starts:

    uniform    offset = hash(seed, number) mod (tokens - length + 1)               with overlaps, any offset
    shuffled   offset = length * permutation(seed, pass)[number mod (tokens // length)]    every row once a pass

Integer arithmetic only, so that the same rows come out on every machine and with every version of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from efla.data.streams import TokenStream

Order = Literal["uniform", "shuffled"]
ORDERS: tuple[Order, ...] = ("uniform", "shuffled")
_ROUNDS = 6


@dataclass(frozen=True)
class RowSampler:
    """The rows of every step: ``RowSampler(stream, length=512, rows=8, seed=42).batch(step, rank, world)``.

    rows: rows of one step over all ranks. order: "uniform" or "shuffled", see the module.
    """

    stream: TokenStream
    length: int
    rows: int
    seed: int
    order: Order = "uniform"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.length < 2 or self.rows < 1:
            raise ValueError(f"a step needs rows of at least 2 tokens, got {self.rows} rows of {self.length}")
        if len(self.stream) < self.length:
            raise ValueError(
                f"the training text has {len(self.stream)} tokens, fewer than one row of {self.length}; "
                "give more text or a shorter length"
            )

    def numbers(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.uint64]:
        """Numbers of the rows that ``rank`` of ``world`` takes at ``step``."""
        if self.rows % world or not 0 <= rank < world:
            raise ValueError(
                f"{self.rows} rows a step cannot be shared evenly by {world} ranks (rank {rank}); "
                "choose a number of rows that is a multiple of the number of ranks"
            )
        share = self.rows // world
        first = step * self.rows + rank * share
        return np.arange(first, first + share, dtype=np.uint64)

    def offsets(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Where those rows start in the stream."""
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
        """The rows themselves: [rows / world, length], int64."""
        return self.stream.rows(self.offsets(step, rank, world), self.length)


def permute(numbers: NDArray[np.uint64], count: int, seed: int, number_of_pass: int) -> NDArray[np.uint64]:
    """A permutation of 0 .. count - 1 at the places asked for, without holding it.

    A Feistel network on the smallest even number of bits that covers ``count``; what falls outside is sent through
    again until it falls inside.
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
    """The finaliser of splitmix64: every bit of the result depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
