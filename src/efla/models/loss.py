"""Next-token cross-entropy without a [tokens, vocabulary] tensor in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def next_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_size: int,
    num_items: int | Tensor | None = None,
    shift: bool = True,
) -> Tensor:
    """Mean over tokens of -log softmax(W h_t)[label_{t+1}], the logits held for ``chunk_size`` tokens at a time.

    hidden: [B, T, d]; weight: [vocabulary, d]; labels: [B, T], -100 where nothing is to be predicted.
    num_items: divide by this instead of the number of labels (gradient accumulation over uneven batches).
    The backward pass computes each chunk's logits again, so that memory is chunk_size * vocabulary, not T * vocabulary.
    """
    if shift:
        labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat_labels = labels.reshape(-1).to(hidden.device)
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for start in range(0, flat_hidden.shape[0], chunk_size):
        piece = flat_hidden[start : start + chunk_size], weight, flat_labels[start : start + chunk_size]
        if torch.is_grad_enabled():
            total = total + checkpoint(_summed_loss, *piece, use_reentrant=False, preserve_rng_state=False)
        else:
            total = total + _summed_loss(*piece)
    if num_items is None:
        num_items = (flat_labels != IGNORED).sum()
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items


def _summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")
