"""Shapes without numbers, and graphs for every length: export, the meta device, fake tensors, FLOP counters."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.utils.flop_counter import FlopCounterMode

from efla.models import EflaForCausalLM
from efla.models.cache import seen_tokens
from tests.models.tiny import ALL, VOCABULARY, random_tokens, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("name", "part", "grad"),
    [
        ("efla", "EflaModel", False),
        ("efla", "EflaForCausalLM", True),
        ("everything", "EflaForCausalLM", False),
        ("everything", "EflaForCausalLM", True),
    ],
)
def test_an_exported_model_takes_any_length_from_one_token_on(name, part, grad):
    model = tiny_model(use_cache=False, **ALL[name]).double()
    model = model.model if part == "EflaModel" else model
    with torch.set_grad_enabled(grad):
        program = export(
            model, (), {"input_ids": random_tokens(2, 40)}, dynamic_shapes={"input_ids": {1: Dim("T", min=1)}}
        ).module()
        for length in (1, 3, 8, 9, 40, 200):
            tokens = random_tokens(2, length)
            torch.testing.assert_close(program(input_ids=tokens)[0], model(tokens)[0])


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", ["efla", "hybrid", "mamba2", "everything"])
def test_a_model_without_numbers_gives_shapes_forwards_and_backwards(name, kind):
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        model = EflaForCausalLM(tiny_config(**ALL[name]))
        tokens = torch.zeros(2, 70, dtype=torch.long)
        # transformers reads the values of a padding mask for softmax layers; a meta tensor has none.
        has_mask = kind == "fake" or "full_attention" not in model.config.layer_types
        mask = torch.ones(2, 70, dtype=torch.long) if has_mask else None
        out = model(tokens, attention_mask=mask, labels=tokens, skip_logits=False)
        out.loss.backward()
        assert out.logits.shape == (2, 70, VOCABULARY)
        assert all(p.grad.shape == p.shape for p in model.parameters())
        model.eval()
        cache = model(tokens[:, :69]).past_key_values
        assert model(tokens[:, 69:], past_key_values=cache).logits.shape == (2, 1, VOCABULARY)


def test_a_flop_counter_sees_the_same_on_meta_as_on_numbers():
    counts = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, tokens = EflaForCausalLM(tiny_config()), torch.zeros(2, 70, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, labels=tokens).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["efla", "mamba2"])
@torch.no_grad()
def test_decoding_is_compiled_once_for_all_lengths(name):
    torch._dynamo.reset()
    model, tokens, counter = tiny_model(**ALL[name], num_hidden_layers=1), random_tokens(2, 40), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    expected = model(tokens).logits
    for _ in range(2):
        cache = compiled(tokens[:, :9], use_cache=True).past_key_values
        for t in range(9, 40):
            logits = compiled(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            torch.testing.assert_close(logits[:, 0], expected[:, t], atol=1e-4, rtol=1e-4)
        assert seen_tokens(cache) == 40
    assert counter.frame_count == 2  # the prompt, and a token


@torch.no_grad()
def test_a_prompt_read_in_pieces_is_one_graph_a_length():
    torch._dynamo.reset()
    model, tokens, counter = tiny_model(num_hidden_layers=1), random_tokens(1, 32), CompileCounter()
    compiled, cache = torch.compile(model, backend=counter, fullgraph=True, dynamic=False), None
    for piece in tokens.split(8, dim=1):
        out = compiled(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    torch.testing.assert_close(out.logits, model(tokens).logits[:, -8:], atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 2  # without a state, and with one
