"""Padding masks and packed sequences, from what Hugging Face's collators and ``generate`` pass."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from efla.models.cache import is_empty
from efla.native.rows import position_in_sequence
from efla.scans.validation import checks_values, has_values


def check_token_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise for a token id outside the vocabulary."""
    if not checks_values(input_ids) or input_ids.numel() == 0:
        return
    low, high = (int(x) for x in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is outside the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}); "
            "is the tokenizer the model's own? (model.resize_token_embeddings makes room for new tokens)"
        )


def local_padding_mask(attention_mask: Tensor | dict[str, Any] | None, length: int) -> Tensor | None:
    """The mask [B, T] of the last T tokens, or ``None`` if none of them is padding."""
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("linear_attention")
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must have shape [B, T], got {list(attention_mask.shape)}; "
            "recurrent layers are causal and can only leave whole tokens out"
        )
    if attention_mask.shape[1] < length:
        raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens, but the input has {length}")
    mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
    if has_values(mask) and bool(mask.all()):
        return None
    return mask


def packed_boundaries(position_ids: Tensor | None, batch_size: int, length: int) -> Tensor | None:
    """Boundaries [N + 1] of sequences in the flattened [B * T] axis where positions restart, or ``None`` if none does."""
    if position_ids is None or position_ids.dim() != 2:
        return None
    if not has_values(position_ids):
        raise ValueError(
            "under torch.compile, on the meta device and with fake tensors packed sequences must be given as cu_seqlens: how "
            "many there are is not known from position_ids; without packing leave position_ids out"
        )
    boundaries = boundaries_of_positions(position_ids, batch_size, length)
    return None if boundaries.shape[0] == batch_size + 1 else boundaries


def boundaries_of_positions(position_ids: Tensor, batch_size: int, length: int) -> Tensor:
    """Boundaries [N + 1] at each row's start and where positions [B or 1, T] do not increase by one."""
    position_ids = position_ids.expand(batch_size, length)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return boundaries_of_starts(starts)


def boundaries_of_starts(starts: Tensor) -> Tensor:
    """Boundaries [N + 1] of sequences that start at the true elements of ``starts`` [B, T]."""
    boundaries = starts.reshape(-1).nonzero().flatten()
    return torch.cat([boundaries, boundaries.new_tensor([starts.numel()])]).to(torch.int32)


def positions_of_packed(cu_seqlens: Tensor, batch_size: int, length: int) -> Tensor:
    """Positions [B, T] that restart with each packed sequence."""
    return position_in_sequence(cu_seqlens, batch_size * length).view(batch_size, length)


def check_row_starts(cu_seqlens: Tensor, batch_size: int, length: int) -> None:
    """Raise unless each row's start is a boundary: sequences do not span rows."""
    if batch_size > 1 and checks_values(cu_seqlens):
        missing = set(range(0, batch_size * length, length)) - set(cu_seqlens.tolist())
        if missing:
            raise ValueError(
                f"cu_seqlens must have a boundary at each row's start, every T = {length} tokens of the flattened [B * T] axis; "
                f"{min(missing)} is missing"
            )


def find_packing(
    attention_mask: Tensor | dict[str, Any] | None,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
    cu_seqlens: Tensor | None,
    batch_size: int,
    length: int,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """Boundaries [N + 1] of packed sequences from ``cu_seqlens``, flash-attention's ``cu_seq_lens_q`` or positions."""
    given = cu_seqlens if cu_seqlens is not None else kwargs.get("cu_seq_lens_q")
    if given is not None:
        if attention_mask is not None:
            raise ValueError("packed sequences (cu_seqlens) take no attention_mask; pad or pack, not both")
        check_row_starts(given, batch_size, length)
        return given.to(torch.int32)
    if attention_mask is None and length > 1 and is_empty(past_key_values):
        return packed_boundaries(position_ids, batch_size, length)
    return None
