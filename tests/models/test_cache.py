"""A cache is where the model stopped: any cut into pieces gives what one pass gives, in constant memory."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import DynamicCache, StaticCache

from efla.models import EflaForCausalLM, accounting
from efla.models.cache import cached_state_bytes, seen_tokens
from efla.models.compat import cached_states
from efla.testing import assert_close
from tests.models.tiny import ALL, EFLA, HYBRID, MAIN, exact_and_rounded, random_tokens, tiny_config, tiny_model
from tests.rounding import assert_same_but_rounding


def in_pieces(model, tokens, lengths, cache, **kwargs):
    pieces = tokens.split(lengths, dim=1)
    return torch.cat([model(piece, past_key_values=cache, use_cache=True, **kwargs).logits for piece in pieces], dim=1)


def make_model(name, weights):
    """strong: large weights, so that a difference anywhere shows; fresh: as training starts."""
    if weights == "strong":
        return tiny_model(**ALL[name])
    torch.manual_seed(0)
    return EflaForCausalLM(tiny_config(**ALL[name])).eval()


@functools.cache
def exact_and_honest(name, weights):
    return exact_and_rounded(make_model(name, weights), random_tokens(2, 23))


@pytest.mark.parametrize("weights", ["strong", "fresh"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "lengths", [[1] * 23, [22, 1], [1, 2, 3, 17], [16, 7]], ids=["ones", "22+1", "1+2+3+17", "16+7"]
)
@torch.no_grad()
def test_prefill_in_pieces_is_one_pass(name, lengths, weights):
    tokens, model = random_tokens(2, 23), make_model(name, weights)
    exact, honest = exact_and_honest(name, weights)
    assert exact.abs().max() > (1 if weights == "strong" else 0.1)

    found = {
        "whole": model(tokens).logits,
        "pieces": in_pieces(model, tokens, lengths, DynamicCache(config=model.config)),
    }
    assert_close(found, dict.fromkeys(found, exact), dict.fromkeys(found, honest))

    model = model.double()  # the same computation, not a similar one
    found = {"pieces": in_pieces(model, tokens, lengths, DynamicCache(config=model.config))}
    assert_same_but_rounding(found, {"pieces": exact}, {"pieces": honest})


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_a_static_cache_serves_as_well(fields):
    model, tokens = tiny_model(**fields).double(), random_tokens(2, 23)
    cache = StaticCache(config=model.config, max_cache_len=32)
    torch.testing.assert_close(in_pieces(model, tokens, [9, 1, 13], cache), model(tokens).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
@torch.no_grad()
def test_state_memory_is_the_formula_s_and_does_not_grow(fields):
    model = tiny_model(**fields)
    cache = DynamicCache(config=model.config)
    sizes = []
    for _ in range(3):
        model(random_tokens(3, 10), past_key_values=cache, use_cache=True)
        sizes.append(cached_state_bytes(cache))
    assert sizes == [3 * accounting.state_bytes(model.config)] * 3


@torch.no_grad()
def test_a_half_precision_model_keeps_a_float32_memory():
    model = tiny_model().to(torch.bfloat16)
    cache = model(random_tokens(2, 10), use_cache=True).past_key_values
    assert cached_states(cache, 0)[1].dtype == torch.float32
    assert cached_state_bytes(cache) == 2 * accounting.state_bytes(model.config, torch.bfloat16)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_the_cache_is_transformers_own_and_is_reordered_copied_and_reset_by_it(fields):
    model, tokens, more = tiny_model(**fields).double(), random_tokens(3, 9), random_tokens(3, 4, seed=2)
    cache = model(tokens, use_cache=True).past_key_values
    assert type(cache) is DynamicCache

    order = torch.tensor([2, 0, 0])
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(order)
    expected = model(torch.cat([tokens[order], more], dim=1)).logits[:, 9:]
    torch.testing.assert_close(model(more, past_key_values=reordered).logits, expected, atol=1e-10, rtol=0)
    # The copy was moved on, the original was not.
    expected = model(torch.cat([tokens, more], dim=1)).logits[:, 9:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, atol=1e-10, rtol=0)

    if fields is EFLA:
        cache.reset()
        assert seen_tokens(cache) == 0
        torch.testing.assert_close(
            model(tokens, past_key_values=cache).logits, model(tokens).logits, atol=1e-10, rtol=0
        )
        assert seen_tokens(cache) == 9


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_the_cache_knows_how_many_tokens_it_has_seen(fields):
    model = tiny_model(**fields)
    cache = DynamicCache(config=model.config)
    assert seen_tokens(cache) == 0
    for length, total in ((5, 5), (1, 6), (7, 13)):
        model(random_tokens(2, length), past_key_values=cache, use_cache=True)
        assert seen_tokens(cache) == total


def test_a_cache_of_another_batch_size_is_refused():
    model = tiny_model()
    cache = model(random_tokens(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"holds states of 2 sequences, but the input has 3; .* or a new cache"):
        model(random_tokens(3, 5), past_key_values=cache)


@pytest.mark.parametrize("wrong", ["without a config", "of another model"])
def test_a_cache_made_for_another_model_is_refused(wrong):
    model = tiny_model(**HYBRID)
    cache = DynamicCache() if wrong == "without a config" else DynamicCache(config=tiny_config())
    with pytest.raises(ValueError, match=r"make it with DynamicCache\(config=model.config\)"):
        model(random_tokens(2, 5), past_key_values=cache)


def test_no_cache_is_kept_unless_asked_while_training():
    model = tiny_model().train()
    assert model(random_tokens(1, 4)).past_key_values is None
    assert model(random_tokens(1, 4), use_cache=True).past_key_values is not None
    assert model.eval()(random_tokens(1, 4)).past_key_values is not None
    assert model(random_tokens(1, 4), use_cache=False).past_key_values is None


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_gradients_flow_through_a_kept_cache(fields):
    model, tokens = tiny_model(**fields).double(), random_tokens(1, 12)
    parameters = list(model.parameters())
    whole = torch.autograd.grad(model(tokens).logits[:, 8:].square().sum(), parameters)
    cache = DynamicCache(config=model.config)
    for piece in (tokens[:, :3], tokens[:, 3:8]):
        model(piece, past_key_values=cache, use_cache=True)
    rest = model(tokens[:, 8:], past_key_values=cache, use_cache=True).logits
    for grad, wanted in zip(torch.autograd.grad(rest.square().sum(), parameters), whole, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-8, rtol=1e-6)
