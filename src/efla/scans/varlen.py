"""Sequences of unequal length: borders in a packed batch, and their cut into chunks that never cross a border."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


def sequence_borders(batch: int, length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Positions in the flattened token axis [B * T] where sequences start, and the end: N + 1 numbers."""
    if cu_seqlens is None:
        return [n * length for n in range(batch + 1)]
    return [int(border) for border in cu_seqlens.tolist()]


@dataclass(frozen=True)
class ChunkGroup:
    """Some consecutive steps of a plan: chunks in step-major order.

    ``tokens`` [M, C] indexes the flattened token axis; entries where ``is_padding`` [M, C] are meaningless, and
    ``real`` lists the others' places in it, flattened (both ``None`` if there is no padding).
    ``num_active[i]`` chunks belong to the group's i-th step; they are those of the first sequences of the plan's order.
    """

    first_chunk: int
    num_active: list[int]
    tokens: Tensor
    is_padding: Tensor | None
    real: Tensor | None

    def steps(self) -> Iterator[slice]:
        """For each step, where its chunks stand in the group."""
        start = 0
        for count in self.num_active:
            yield slice(start, start + count)
            start += count


@dataclass(frozen=True)
class ChunkPlan:
    """A cut of N sequences into chunks of C tokens, ordered by (chunk number within the sequence, sequence).

    Sequences are taken longest first, so that those still running at any step are a prefix of ``order``.
    """

    order: list[int]
    starts: list[int]
    lengths: list[int]
    chunk_size: int

    @classmethod
    def build(cls, borders: list[int], chunk_size: int) -> ChunkPlan:
        lengths = [end - start for start, end in pairwise(borders)]
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        return cls(order, [borders[n] for n in order], [lengths[n] for n in order], chunk_size)

    def num_chunks(self) -> int:
        return sum(-(-length // self.chunk_size) for length in self.lengths)

    def groups(self, max_chunks: int, device: torch.device) -> Iterator[ChunkGroup]:
        """Groups of consecutive steps with at most ``max_chunks`` chunks (at least one step) each."""
        offsets = torch.arange(self.chunk_size)
        longest = self.lengths[0] if self.lengths else 0
        first_chunk, running, step = 0, len(self.lengths), 0
        while step * self.chunk_size < longest:
            num_active: list[int] = []
            starts: list[int] = []
            counts: list[int] = []
            while step * self.chunk_size < longest:
                position = step * self.chunk_size
                while self.lengths[running - 1] <= position:
                    running -= 1
                if num_active and len(starts) + running > max_chunks:
                    break
                num_active.append(running)
                starts += [start + position for start in self.starts[:running]]
                counts += [min(length - position, self.chunk_size) for length in self.lengths[:running]]
                step += 1
            # Made on the host and sent over: nothing here waits for the device.
            tokens = torch.tensor(starts)[:, None] + offsets
            is_padding = real = None
            if min(counts) < self.chunk_size:
                is_padding = offsets >= torch.tensor(counts)[:, None]
                tokens = torch.where(is_padding, tokens[:, :1], tokens)
                real = torch.nonzero(~is_padding.flatten()).flatten().to(device)
                is_padding = is_padding.to(device)
            yield ChunkGroup(first_chunk, num_active, tokens.to(device), is_padding, real)
            first_chunk += len(starts)
