"""Whatever the head is, the loss is the cross-entropy of its own logits; adapters and quantisation work on head and embedding."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tests.models.tiny import VOCABULARY, random_tokens, tiny_model

TOKENS = random_tokens(2, 11)


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def set_bias(model, stack):
    model.lm_head.bias = nn.Parameter(torch.linspace(-2, 2, VOCABULARY, dtype=torch.float64))


def replace_by_subclass(model, stack):
    head = ScaledLinear(32, VOCABULARY, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


def replace_forward(model, stack):
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: 2 * plain(x)


def register_global_hook(model, stack):
    hook = nn.modules.module.register_module_forward_hook(lambda m, x, y: 2 * y if m is model.lm_head else None)
    stack.callback(hook.remove)


HEADS = {
    "bias": set_bias,
    "subclass": replace_by_subclass,
    "replaced forward": replace_forward,
    "parametrized": lambda model, _: parametrize.register_parametrization(model.lm_head, "weight", Scaled()),
    "forward hook": lambda model, _: model.lm_head.register_forward_hook(lambda m, x, y: 2 * y),
    "forward pre-hook": lambda model, _: model.lm_head.register_forward_pre_hook(lambda m, x: 2 * x[0]),
    "backward hook": lambda model, _: model.lm_head.register_full_backward_hook(lambda m, gx, gy: (2 * gx[0],)),
    "backward pre-hook": lambda model, _: model.lm_head.register_full_backward_pre_hook(lambda m, gy: (2 * gy[0],)),
    "global hook": register_global_hook,
}


def cross_entropy(logits):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def assert_loss_is_that_of_the_logits(model):
    """Chunked, in value and in every gradient."""
    losses = [model(TOKENS, labels=TOKENS, skip_logits=True).loss, cross_entropy(model(TOKENS).logits)]
    torch.testing.assert_close(*losses)
    wanted = [p for p in model.parameters() if p.requires_grad]
    for grad, expected in zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_the_loss_goes_through_the_head_module(change):
    model = tiny_model(loss_chunk_size=5).double()
    with ExitStack() as stack:
        change(model, stack)
        assert_loss_is_that_of_the_logits(model)


def test_a_head_s_dropout_draws_the_same_numbers_in_the_backward_pass():
    model = tiny_model(loss_chunk_size=100).double()
    model.lm_head = nn.Sequential(nn.Dropout(0.5), model.lm_head)
    wanted = list(model.parameters())
    gradients = []
    for chunked in (True, False):
        torch.manual_seed(0)
        model.lm_head.train()
        loss = model(TOKENS, labels=TOKENS, skip_logits=True).loss if chunked else cross_entropy(model(TOKENS).logits)
        gradients.append(torch.autograd.grad(loss, wanted))
    for grad, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(grad, expected)


def test_a_plain_head_is_differentiated_at_the_weight_of_the_forward_pass():
    model = tiny_model(loss_chunk_size=5).double()
    doubled = (2 * model.lm_head.weight).detach().requires_grad_()
    wanted = [doubled, model.model.norm.weight]
    weights = {"lm_head.weight": doubled}
    losses = [
        torch.func.functional_call(model, weights, (TOKENS,), {"labels": TOKENS, "skip_logits": True}).loss,
        cross_entropy(torch.func.functional_call(model, weights, (TOKENS,)).logits),
    ]
    for grad, expected in zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True):
        torch.testing.assert_close(grad, expected)


ADAPTERS = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both, and layers": {"target_modules": ["lm_head", "embed_tokens", "q_proj", "o_proj", "up_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [14, 50]},
    "head as a copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("fields", ADAPTERS.values(), ids=ADAPTERS)
def test_peft_adapters_on_head_and_embedding_change_the_loss_and_learn(fields):
    plain = tiny_model(loss_chunk_size=5).double()(TOKENS, labels=TOKENS).loss
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=16, init_lora_weights=False, **fields)
    model = peft.get_peft_model(tiny_model(loss_chunk_size=5).double(), config).double()
    assert not torch.isclose(model(TOKENS, labels=TOKENS).loss, plain, rtol=1e-4)
    assert_loss_is_that_of_the_logits(model)
    model(TOKENS, labels=TOKENS, skip_logits=True).loss.backward()
    learned = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert learned and all(grad is not None and grad.any() for grad in learned.values())


def test_a_wrapped_embedding_still_names_a_token_outside_the_vocabulary():
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match=f"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"):
        model(torch.tensor([[VOCABULARY]]))


def test_an_int8_model_has_the_loss_of_its_logits():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own quantisation
        model = torch.ao.quantization.quantize_dynamic(tiny_model(loss_chunk_size=1000), {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(model.lm_head, nn.Linear)
    out = model(TOKENS, labels=TOKENS)
    # One chunk: the head scales its activations by their largest value in a call.
    torch.testing.assert_close(out.loss, cross_entropy(out.logits))
