"""Padding is as if it were not there; packed sequences are as if each were alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache

from efla.models.inputs import packed_boundaries
from tests.models.tiny import ALL, EFLA, HYBRID, MAIN, random_tokens, tiny_model

MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10, [0] * 6 + [1] * 4],
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 10, [1] * 4 + [0] * 6],
    "middle": [[1, 1, 0, 0, 1, 0, 1, 1, 1, 0], [1] * 10, [0, 1, 0, 1, 1, 0, 0, 0, 1, 1]],
}


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@torch.no_grad()
def test_padding_does_not_change_real_tokens(fields, mask):
    model = tiny_model(**fields).double()
    tokens, mask = random_tokens(3, 10), torch.tensor(mask)
    logits = model(tokens, attention_mask=mask).logits
    for row in range(3):
        real = mask[row].bool()
        alone = model(tokens[row : row + 1, real]).logits[0]
        torch.testing.assert_close(logits[row, real], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@torch.no_grad()
def test_padding_leaves_no_trace_in_the_state(fields, mask):
    model = tiny_model(**fields).double()
    tokens, mask, more = random_tokens(3, 10), torch.tensor(mask), random_tokens(3, 4, seed=2)
    cache = DynamicCache(config=model.config)
    model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
    longer = torch.cat([mask, torch.ones(3, 4, dtype=mask.dtype)], dim=1)
    logits = model(more, attention_mask=longer, past_key_values=cache, use_cache=True).logits
    for row in range(3):
        alone = torch.cat([tokens[row, mask[row].bool()], more[row]])[None]
        torch.testing.assert_close(logits[row], model(alone).logits[0, -4:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
@pytest.mark.parametrize("given", ["cu_seqlens", "position_ids", "cu_seq_lens_q"])
@torch.no_grad()
def test_packed_sequences_equal_separate_documents(fields, given):
    model = tiny_model(**fields).double()
    lengths = [5, 1, 2, 11, 4]
    documents = [random_tokens(1, length, seed=length) for length in lengths]
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packing = {
        "cu_seqlens": {"cu_seqlens": boundaries},
        "position_ids": {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]},
        "cu_seq_lens_q": {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": 11,
            "max_length_k": 11,
        },
    }[given]
    packed = model(torch.cat(documents, dim=1), **packing).logits
    separate = torch.cat([model(document).logits for document in documents], dim=1)
    torch.testing.assert_close(packed, separate, atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_the_packed_loss_and_gradients_are_those_of_separate_documents(fields):
    model = tiny_model(**fields).double().train()
    documents = [random_tokens(1, length, seed=length) for length in (7, 4, 9)]
    losses = [model(document, labels=document).loss * (document.shape[1] - 1) for document in documents]
    separate = torch.stack(losses).sum() / 17
    expected = torch.autograd.grad(separate, list(model.parameters()))

    packed = torch.cat(documents, dim=1)
    loss = model(packed, labels=packed, cu_seqlens=torch.tensor([0, 7, 11, 20])).loss
    torch.testing.assert_close(loss, separate)
    for grad, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_transformers_flattening_collator_packs_for_this_model(fields):
    model = tiny_model(**fields).double().train()
    documents = [random_tokens(length, seed=length).tolist() for length in (7, 4, 9)]
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": document} for document in documents])
    loss = model(**batch).loss
    losses = [model(torch.tensor([d]), labels=torch.tensor([d])).loss * (len(d) - 1) for d in documents]
    torch.testing.assert_close(loss, torch.stack(losses).sum() / 17)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_rows_of_a_packed_batch_are_apart(fields):
    model = tiny_model(**fields).double()
    tokens = random_tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    packed = model(tokens, position_ids=positions).logits
    for row, cut in ((0, 4), (1, 2)):
        pieces = [tokens[row : row + 1, :cut], tokens[row : row + 1, cut:]]
        separate = torch.cat([model(piece).logits for piece in pieces], dim=1)
        torch.testing.assert_close(packed[row], separate[0], atol=1e-10, rtol=0)


def test_positions_that_run_on_are_one_sequence():
    assert packed_boundaries(torch.arange(5, 14)[None], 3, 9) is None
    assert packed_boundaries(torch.tensor([[0, 1, 0, 1, 2]]), 1, 5).tolist() == [0, 2, 5]
    assert packed_boundaries(torch.tensor([[0, 1, 0], [0, 1, 2]]), 2, 3).tolist() == [0, 2, 3, 6]


def test_a_packed_sequence_may_not_run_on_into_the_next_row():
    with pytest.raises(ValueError, match=r"boundary at each row's start.* 6 is missing"):
        tiny_model()(random_tokens(2, 6), cu_seqlens=torch.tensor([0, 4, 8, 12]))


def test_packing_and_padding_at_once_is_refused():
    model, tokens = tiny_model(), random_tokens(1, 6)
    with pytest.raises(ValueError, match="pad or pack, not both"):
        model(tokens, cu_seqlens=torch.tensor([0, 2, 6]), attention_mask=torch.ones_like(tokens))


def test_packed_sequences_do_not_continue_from_a_cache():
    model, tokens = tiny_model(), random_tokens(1, 6)
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot continue from a cache"):
        model(tokens, cu_seqlens=torch.tensor([0, 2, 6]), past_key_values=cache)


@pytest.mark.parametrize("fields", [EFLA, HYBRID], ids=["efla", "hybrid"])
def test_a_mask_over_pairs_of_tokens_is_refused(fields):
    model, tokens = tiny_model(**fields), random_tokens(1, 6)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\]"):
        model(tokens, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(ValueError, match="covers 5 tokens"):
        model(tokens, attention_mask=torch.ones(1, 5))
