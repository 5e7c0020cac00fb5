"""Bits per byte of a token stream, in rows of the training length and by position in long rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from efla.evaluation.likelihood import Request, score
from efla.evaluation.perplexity import token_log_probs


@dataclass(frozen=True)
class StreamResult:
    """Bits per token (per byte, where bytes are tokens), its perplexity, and how many tokens were scored."""

    bits_per_token: float
    perplexity: float
    num_scored: int


def stream_bits(
    model: Any, tokens: Sequence[int] | NDArray[Any], row_length: int, *, batch_tokens: int = 8192
) -> StreamResult:
    """Consecutive rows of ``row_length`` tokens, each scored from its second token on, the state reset for every row.

    The last row may be shorter. For a byte model this is the test bits per byte of spec lm.md 7.4.
    """
    if row_length < 2 or len(tokens) < 2:
        raise ValueError(
            f"rows and text must have at least 2 tokens, got rows of {row_length} and {len(tokens)} tokens"
        )
    ids = np.asarray(tokens).tolist()
    rows = [ids[i : i + row_length] for i in range(0, len(ids), row_length)]
    requests = [Request(row, len(row) - 1) for row in rows if len(row) > 1]
    total = math.fsum(value.log_prob for value in score(model, requests, batch_tokens=batch_tokens))
    count = sum(request.num_scored for request in requests)
    return StreamResult(-total / count / math.log(2), math.exp(-total / count), count)


@dataclass(frozen=True)
class PositionCurve:
    """Mean bits of the tokens at positions ``starts[i]`` to ``ends[i]`` (1-based, inclusive), with its standard error over rows.

    Position t is the t-th token that is predicted, t tokens after the row's start.
    """

    starts: list[int]
    ends: list[int]
    bits: list[float]
    standard_errors: list[float]
    num_rows: int


def bits_by_position(
    model: Any,
    rows: Sequence[Sequence[int]],
    buckets: Sequence[tuple[int, int]],
    *,
    window: int = 1024,
    batch_rows: int = 8,
    progress: Callable[[int], None] | None = None,
) -> PositionCurve:
    """Bits per token by position, the state carried from a row's first token to its last.

    rows: equally long, at least as long as the last bucket's end plus one. buckets: (first, last) positions, 1-based.
    Softmax attention runs too, at a cost that grows with the position. ``progress`` counts tokens.
    """
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or not buckets or min(lengths) <= max(end for _, end in buckets):
        raise ValueError(
            f"rows must be equally long and longer than the last position, {max((e for _, e in buckets), default=0)}; got "
            f"{len(rows)} rows of {sorted(lengths)} tokens"
        )
    sums = np.zeros((len(rows), len(buckets)))
    for at in range(0, len(rows), batch_rows):
        batch = rows[at : at + batch_rows]
        position = 1
        for pieces in token_log_probs(model, batch, window):
            values = torch.stack(pieces).double().cpu().numpy()  # [rows, window]
            length = values.shape[1]
            for j, (first, last) in enumerate(buckets):
                low, high = max(first, position) - position, min(last, position + length - 1) - position + 1
                if low < high:
                    sums[at : at + len(batch), j] -= values[:, low:high].sum(1)
            position += length
            if progress is not None:
                progress(len(batch) * length)
            if position > buckets[-1][1]:
                break
    widths = np.array([last - first + 1 for first, last in buckets])
    bits = sums / widths / math.log(2)
    errors = bits.std(0, ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else np.full(len(buckets), math.nan)
    return PositionCurve(
        [first for first, _ in buckets],
        [last for _, last in buckets],
        bits.mean(0).tolist(),
        errors.tolist(),
        len(rows),
    )


def even_buckets(length: int, width: int = 64) -> list[tuple[int, int]]:
    """1 to 64, 65 to 128, ... up to ``length`` (spec lm.md 7.4); the last may be shorter."""
    return [(first, min(first + width - 1, length)) for first in range(1, length + 1, width)]


def doubling_buckets(length: int, first: int = 64) -> list[tuple[int, int]]:
    """1 to 64, 65 to 128, 129 to 256, 257 to 512, ... up to ``length``."""
    found = [(1, min(first, length))]
    while found[-1][1] < length:
        start = found[-1][1]
        found.append((start + 1, min(2 * start, length)))
    return found
