"""Log-likelihood of long texts, in independent windows or with the model's state carried, and loss by position."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efla import state
from efla.evaluation.likelihood import HALF_DTYPES, MAX_LOGITS, Request, Scores, padded, score
from efla.models.cache import why_not_recurrent

Done = Callable[[list[tuple[int, float]]], None]


def rolling_windows(tokens: Sequence[int], prefix_token: int, max_length: int) -> Iterator[Request]:
    """Windows that score each token once, as lm-evaluation-harness makes them.

    The first window scores ``max_length`` tokens after the prefix token, each later one the next ``max_length`` after one
    token of context. The last window has fewer tokens to score and is filled up with context.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    for start in range(0, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        if start == 0:
            yield Request([prefix_token, *tokens[:end]], end)
        else:
            yield Request(list(tokens[end - max_length - 1 : end]), end - start)


def rolling_log_likelihoods(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    prefix_token: int,
    max_length: int,
    batch_tokens: int = 4096,
    done: Done | None = None,
    add: Callable[[Iterable[float]], float] = math.fsum,
) -> list[float]:
    """Each text's log-likelihood in nats, in independent windows of ``max_length``.

    done: called with (index, log-likelihood) of texts whose last window is scored. add: sums the windows of a text.
    """
    windows = [(i, w) for i, text in enumerate(texts) for w in rolling_windows(text, prefix_token, max_length)]
    left = Counter(i for i, _ in windows)
    parts: list[dict[int, float]] = [{} for _ in texts]  # by number of the window

    def total(i: int) -> float:
        return add(parts[i][k] for k in sorted(parts[i]))

    def collect(finished: Scores) -> None:
        complete = []
        for k, value in finished:
            i = windows[k][0]
            parts[i][k] = value.log_prob
            left[i] -= 1
            if not left[i]:
                complete.append((i, total(i)))
        if done is not None and complete:
            done(complete)

    score(model, [window for _, window in windows], batch_tokens=batch_tokens, done=collect)
    return [total(i) for i in range(len(texts))]


def carried_log_likelihoods(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    prefix_token: int,
    max_length: int,
    batch_tokens: int = 4096,
    done: Done | None = None,
) -> list[float]:
    """Each text's log-likelihood in nats, with every token conditioned on all tokens before it.

    The model reads ``max_length`` tokens at a time and carries its state, so the result does not depend on it. ``done`` is
    called per text.
    """
    reason = why_not_carried(model)
    if reason is not None:
        raise ValueError(
            f"the state of this {model.config.model_type!r} model cannot be carried over windows: {reason}"
        )
    totals = [0.0] * len(texts)
    order = [i for i in sorted(range(len(texts)), key=lambda i: -len(texts[i])) if texts[i]]
    # A window is limited so that its logits fit into memory.
    width = max(1, min(max_length, MAX_LOGITS // int(model.config.get_text_config().vocab_size)))
    rows = max(1, batch_tokens // width)
    for at in range(0, len(order), rows):
        batch = order[at : at + rows]
        for log_probs in token_log_probs(model, [[prefix_token, *texts[i]] for i in batch], width):
            for i, piece in zip(batch, log_probs, strict=False):
                totals[i] += math.fsum(piece.tolist())
        if done is not None:
            done([(i, totals[i]) for i in batch])
    return totals


@torch.no_grad()
def token_log_probs(model: Any, rows: Sequence[Sequence[int]], window: int) -> Iterator[list[Tensor]]:
    """Log-probabilities of rows[i][1:], read ``window`` tokens at a time with the state carried.

    Rows must be sorted longest first; each yield holds one vector per row that has not ended.
    """
    device = next(model.parameters()).device
    assert all(len(a) >= len(b) for a, b in pairwise(rows)), "rows must come longest first"
    cache = None
    alive = len(rows)
    for start in range(0, len(rows[0]) - 1, window):
        still = sum(len(row) - 1 > start for row in rows)
        if cache is not None and still < alive:
            cache = state.select(cache, torch.arange(still, device=device))
        alive = still
        pieces = [row[start : start + window + 1] for row in rows[:alive]]
        length = len(pieces[0]) - 1
        # A row that ends inside this window is padded on the right and dropped before the next.
        tokens = padded(pieces, device, length + 1)
        out = model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits.float() if out.logits.dtype in HALF_DTYPES else out.logits
        picked = logits.gather(-1, tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)
        yield [picked[i, : len(piece) - 1] for i, piece in enumerate(pieces)]


def why_not_carried(model: Any) -> str | None:
    """Why the model's state cannot be carried over windows, or ``None`` if it can.

    Recurrent models of other packages are tested on a few tokens.
    """
    reason = why_not_recurrent(model)
    if reason is not None or model.config.model_type == "efla":
        return reason
    tokens = [1 + 7 * i % (int(model.config.get_text_config().vocab_size) - 1) for i in range(34)]
    try:
        whole = torch.cat([piece[0] for piece in token_log_probs(model, [tokens], 64)])
        pieces = torch.cat([piece[0] for piece in token_log_probs(model, [tokens], 7)])
    except Exception as error:
        return f"transformers' {model.config.model_type!r} does not continue from a state ({type(error).__name__}: {error})"
    gap = float((whole - pieces).abs().max())
    forgets = f"transformers' {model.config.model_type!r} forgets between windows (by {gap:.2g} nats)"
    return None if gap < 1e-2 else forgets


@dataclass(frozen=True)
class PositionCurve:
    """Mean bits of the tokens at positions ``starts[i]`` to ``ends[i]``, with the standard error over rows.

    Positions are 1-based and inclusive; position t is the t-th predicted token of a row.
    """

    starts: list[int]
    ends: list[int]
    bits: list[float]
    standard_errors: list[float]


def bits_by_position(
    model: Any,
    rows: Sequence[Sequence[int]],
    buckets: Sequence[tuple[int, int]],
    *,
    window: int = 1024,
    batch_rows: int = 8,
    progress: Callable[[int], None] | None = None,
) -> PositionCurve:
    """Bits per token by position, with the state carried through each row.

    rows: of equal length, longer than the last position. buckets: (first, last) positions, 1-based.
    progress: called with the number of tokens just read. Softmax attention works too, at a cost that grows with position.
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
    starts, ends = ([bucket[side] for bucket in buckets] for side in (0, 1))
    return PositionCurve(starts, ends, bits.mean(0).tolist(), errors.tolist())


def even_buckets(length: int, width: int = 64) -> list[tuple[int, int]]:
    """1 to 64, 65 to 128, ... up to ``length``; the last may be shorter."""
    return [(first, min(first + width - 1, length)) for first in range(1, length + 1, width)]


def doubling_buckets(length: int, first: int = 64) -> list[tuple[int, int]]:
    """1 to 64, 65 to 128, 129 to 256, 257 to 512, ... up to ``length``."""
    found = [(1, min(first, length))]
    while found[-1][1] < length:
        start = found[-1][1]
        found.append((start + 1, min(2 * start, length)))
    return found
