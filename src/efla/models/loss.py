"""Next-token cross-entropy without a [tokens, vocabulary] tensor in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def next_token_loss(
    hidden: Tensor,
    head: nn.Module | Tensor,
    labels: Tensor,
    *,
    chunk_size: int,
    num_items: int | Tensor | None = None,
    shift: bool = True,
) -> Tensor:
    """Mean over tokens of -log softmax(head(h_t))[label_{t+1}], the logits held for ``chunk_size`` tokens at a time.

    hidden: [B, T, d]; labels: [B, T], -100 where nothing is to be predicted.
    head: a module that maps [1, n, d] to [1, n, vocabulary], or the weight [vocabulary, d] of a linear map.
    num_items: divide by this instead of the number of labels (gradient accumulation over uneven batches).
    The backward pass computes each chunk's logits again, so that memory is chunk_size * vocabulary, not T * vocabulary.
    """
    if shift:
        labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    if isinstance(head, nn.Module):
        head = _plain_weight(head)
    has_own_code = isinstance(head, nn.Module)  # a LoRA adapter's dropout must draw the same numbers again
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat_labels = labels.reshape(-1).to(hidden.device)
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for start in range(0, flat_hidden.shape[0], chunk_size):
        piece = flat_hidden[start : start + chunk_size], head, flat_labels[start : start + chunk_size]
        if torch.is_grad_enabled():
            total = total + checkpoint(_summed_loss, *piece, use_reentrant=False, preserve_rng_state=has_own_code)
        else:
            total = total + _summed_loss(*piece)
    if num_items is None:
        num_items = (flat_labels != IGNORED).sum()
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items


def _plain_weight(head: nn.Module) -> nn.Module | Tensor:
    """The weight of a head whose call is nothing but ``functional.linear`` with it; any other head as it is.

    The backward pass computes the logits again. A weight that is passed on then stays the one of the forward pass, also
    under ``torch.func.functional_call``.
    """
    is_plain = (
        type(head) is nn.Linear  # neither a subclass nor parametrized, which makes one
        and head.bias is None
        and type(head.weight) in (Tensor, nn.Parameter)
        and "forward" not in vars(head)
        and not (head._forward_pre_hooks or head._forward_hooks or head._backward_pre_hooks or head._backward_hooks)
        and not _has_any_global_hook()
    )
    return head.weight if is_plain else head


def _summed_loss(hidden: Tensor, head: nn.Module | Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden[None])[0] if isinstance(head, nn.Module) else functional.linear(hidden, head)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")
