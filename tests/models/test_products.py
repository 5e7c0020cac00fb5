"""Where oneDNN multiplies faster than torch's own choice, every product of a model takes it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from efla.models.quantization import pack_linears
from efla.native import rows
from tests.models.tiny import ALL, random_tokens, tiny_model

pytestmark = pytest.mark.usefixtures("onednn_products")


@pytest.mark.parametrize("name", ALL)
def test_the_forward_and_backward_pass_of_a_model(name, monkeypatch):
    model, tokens = tiny_model(**ALL[name]).train(), random_tokens(2, 40)
    monkeypatch.setattr(rows, "onednn_is_faster", lambda: False)
    model(tokens, labels=tokens).loss.backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(rows, "onednn_is_faster", lambda: True)
    monkeypatch.delattr(functional, "linear")
    model(tokens, labels=tokens).loss.backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[key], rtol=1e-3, atol=1e-4 * float(expected[key].abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_a_prompt_with_smaller_weights(weights, monkeypatch):
    model, tokens = pack_linears(tiny_model(hidden_size=64), weights), random_tokens(2, 40)
    monkeypatch.setattr(rows, "onednn_is_faster", lambda: False)
    expected = model(tokens).logits
    monkeypatch.setattr(rows, "onednn_is_faster", lambda: True)
    monkeypatch.delattr(functional, "linear")
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-3)


def test_a_replaced_map_runs_its_own_code(monkeypatch):
    model, tokens = tiny_model(), random_tokens(2, 40)
    called = []
    model.model.layers[0].mixer.q_proj.register_forward_hook(lambda *_: called.append(1))
    model(tokens)
    assert called
