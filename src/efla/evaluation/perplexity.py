"""Log-likelihood of long texts: in windows that start afresh, or with the model's state carried from one to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from efla.evaluation.likelihood import MAX_LOGITS, Request, score
from efla.models.cache import select_rows, why_not_recurrent

Done = Callable[[list[tuple[int, Any]]], None]


def rolling_windows(tokens: Sequence[int], prefix_token: int, max_length: int) -> Iterator[Request]:
    """Windows in which each token is scored once, the harness's way.

    The first window scores ``max_length`` tokens after the prefix token, each later one ``max_length`` more after one token
    of context; the last, which has fewer left to score, is filled up with context to ``max_length``.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    for start in range(0, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        if start == 0:
            yield Request([prefix_token, *tokens[:end]], end)
        else:
            yield Request(list(tokens[end - max_length - 1 : end]), end - start)


@torch.no_grad()
def rolling_log_likelihoods(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    prefix_token: int,
    max_length: int,
    batch_tokens: int = 4096,
    done: Done | None = None,
) -> list[float]:
    """Each text's log-likelihood in nats, windows of ``max_length`` on their own. ``done`` counts windows."""
    windows = [(i, w) for i, text in enumerate(texts) for w in rolling_windows(text, prefix_token, max_length)]
    scores = score(model, [window for _, window in windows], batch_tokens=batch_tokens, done=done)
    parts: list[list[float]] = [[] for _ in texts]
    for (i, _), value in zip(windows, scores, strict=True):
        parts[i].append(value.log_prob)
    return [math.fsum(part) for part in parts]


@torch.no_grad()
def carried_log_likelihoods(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    prefix_token: int,
    max_length: int,
    batch_tokens: int = 4096,
    done: Done | None = None,
) -> list[float]:
    """Each text's log-likelihood in nats when every token sees all of its text before it.

    ``max_length`` tokens are read at a time and the state goes on; the result does not depend on it. ``done`` counts texts.
    """
    reason = why_not_carried(model)
    if reason is not None:
        raise ValueError(
            f"the state of this {model.config.model_type!r} model cannot be carried over windows: {reason}"
        )
    totals = [0.0] * len(texts)
    order = [i for i in sorted(range(len(texts)), key=lambda i: -len(texts[i])) if texts[i]]
    width = min(max_length, _window(model))
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
    """Log-probabilities of rows[i][1:] given all before, read ``window`` tokens at a time with the state carried on.

    Rows come longest first; each yield holds one vector for every row that is not yet at its end.
    """
    device = next(model.parameters()).device
    assert all(len(a) >= len(b) for a, b in pairwise(rows)), "rows must come longest first"
    cache = None
    alive = len(rows)
    for start in range(0, len(rows[0]) - 1, window):
        still = sum(len(row) - 1 > start for row in rows)
        if cache is not None and still < alive:
            cache = select_rows(cache, torch.arange(still, device=device))
        alive = still
        pieces = [row[start : start + window + 1] for row in rows[:alive]]
        length = len(pieces[0]) - 1
        tokens = torch.zeros(alive, length + 1, dtype=torch.long, device=device)
        for i, piece in enumerate(pieces):
            tokens[i, : len(piece)] = torch.tensor(list(piece), device=device)
        # A row that ends inside this window is padded on the right and taken out before the next.
        out = model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits.float() if out.logits.dtype in (torch.float16, torch.bfloat16) else out.logits
        picked = logits.gather(-1, tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)
        yield [picked[i, : len(piece) - 1] for i, piece in enumerate(pieces)]


def why_not_carried(model: Any) -> str | None:
    """Why the model's state cannot be carried over windows, or ``None`` if it can; a foreign model is tried on some tokens."""
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
    return (
        None if gap < 1e-2 else f"transformers' {model.config.model_type!r} forgets between windows (by {gap:.2g} nats)"
    )


def _window(model: Any) -> int:
    """Tokens whose logits fit in memory at once."""
    return max(1, int(MAX_LOGITS // int(model.config.get_text_config().vocab_size)))
