"""The chunked loss is cross-entropy, in value and gradient, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from efla.models.modeling_efla import next_token_loss
from tests.models.tiny import MAIN, VOCABULARY, random_tokens, tiny_model


def reference(hidden, weight, labels):
    logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.parametrize("chunk_size", [1, 7, 13, 1000])
def test_the_chunked_loss_and_its_gradients_are_cross_entropy_s(chunk_size):
    hidden = torch.randn(3, 13, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (3, 13))
    labels[1, 4:9] = -100
    loss = next_token_loss(hidden, weight, labels, chunk_size=chunk_size)
    expected = reference(hidden, weight, labels)
    torch.testing.assert_close(loss, expected)
    grads, wanted = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected))
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want)
    with torch.no_grad():
        torch.testing.assert_close(next_token_loss(hidden, weight, labels, chunk_size=chunk_size), expected)


def test_bfloat16_logits_are_reduced_in_float32():
    hidden, weight = torch.randn(2, 9, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    labels = torch.randint(0, 50, (2, 9))
    loss = next_token_loss(hidden, weight, labels, chunk_size=4)
    assert loss.dtype == torch.float32
    logits = functional.linear(hidden, weight).float()[:, :-1].flatten(0, 1)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels[:, 1:].flatten()))


HEADS = {"weight": torch.randn(5000, 16, requires_grad=True), "module": nn.Linear(16, 5000)}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_the_largest_tensor_is_a_chunk_of_logits_forwards_and_backwards(head):
    hidden = torch.randn(4, 256, 16, requires_grad=True)
    labels = torch.randint(0, 5000, (4, 256))

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    Largest.size = max(Largest.size, x.numel())
            return out

    with Largest():
        next_token_loss(hidden, head, labels, chunk_size=64).backward()
    assert Largest.size == 64 * 5000  # not 4 * 256 * 5000


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_no_logits_are_kept_for_the_backward_pass(head):
    hidden = torch.randn(4, 256, 16, requires_grad=True)
    labels = torch.randint(0, 5000, (4, 256))
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        next_token_loss(hidden, head, labels, chunk_size=64)
    assert sum(x.numel() for x in kept.values()) < 64 * 5000


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_the_model_s_loss_is_that_of_its_logits(fields):
    model, tokens = tiny_model(loss_chunk_size=5, **fields), random_tokens(2, 11)
    labels = tokens.masked_fill(torch.rand(2, 11) < 0.3, -100)
    out = model(tokens, labels=labels)
    expected = functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    assert out.logits.shape == (2, 11, VOCABULARY)


def test_training_returns_no_logits_unless_asked():
    model, tokens = tiny_model(), random_tokens(2, 11)
    assert model.train()(tokens, labels=tokens).logits is None
    assert model(tokens, labels=tokens, skip_logits=False).logits is not None
    assert model(tokens).logits is not None
    assert model.eval()(tokens, labels=tokens, skip_logits=True).logits is None


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_number_of_items_replaces_the_mean_for_gradient_accumulation(as_tensor):
    model, tokens = tiny_model().train(), random_tokens(4, 9)
    mean = model(tokens, labels=tokens).loss
    items = torch.tensor(32) if as_tensor else 32
    halves = [model(half, labels=half, num_items_in_batch=items).loss for half in tokens.split(2)]
    torch.testing.assert_close(sum(halves), mean)


def test_labels_that_are_all_ignored_give_no_number():
    # As torch's cross_entropy: the mean of nothing.
    model, tokens = tiny_model(), random_tokens(1, 5)
    assert model(tokens, labels=torch.full_like(tokens, -100)).loss.isnan()
