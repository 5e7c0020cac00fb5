"""A cache is where the model stopped: any cut into pieces gives what one pass gives, in constant memory."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from efla.models import EflaForCausalLM, accounting
from efla.models.cache import seen_tokens, state_bytes

from .tiny import ALL, EFLA, HYBRID, MAIN, random_tokens, tiny_config, tiny_model


def in_pieces(model, tokens, lengths, cache, **kwargs):
    pieces = tokens.split(lengths, dim=1)
    return torch.cat([model(piece, past_key_values=cache, use_cache=True, **kwargs).logits for piece in pieces], dim=1)


# With these weights the first layer's memory answers some tokens with 3e-5 where 1e-2 is usual, and the output norm enlarges
# that, rounding included, a thousand times: half a float32 ulp in the weights moves the logits by up to 1e-4 (computed in
# float64), and every backend's float32 run is 2e-5 off. So each run is held to that reach instead of 1e-5 from the other.
ILL_CONDITIONED = "gated_delta-grouped"


def rounding_reach(model, tokens):
    """How far the logits move, in float64, when every weight is moved at random by at most half a float32 ulp."""
    exact = copy.deepcopy(model).double()
    logits, reach = exact(tokens).logits, 0.0
    for seed in range(20):
        random, moved = torch.Generator().manual_seed(seed), copy.deepcopy(exact)
        for weight in moved.parameters():
            weight.mul_(1 + (2 * torch.rand(weight.shape, generator=random, dtype=weight.dtype) - 1) * 2**-24)
        reach = max(reach, float((moved(tokens).logits - logits).abs().max()))
    return reach


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "lengths", [[1] * 23, [22, 1], [1, 2, 3, 17], [16, 7]], ids=["ones", "22+1", "1+2+3+17", "16+7"]
)
@torch.no_grad()
def test_prefill_in_pieces_is_one_pass(name, lengths):
    tokens = random_tokens(2, 23)
    strong = tiny_model(**ALL[name])  # large weights, so that a difference anywhere shows
    whole = strong(tokens).logits
    assert whole.abs().max() > 1
    pieces = in_pieces(strong, tokens, lengths, DynamicCache(config=strong.config))
    if name == ILL_CONDITIONED:
        exact, reach = copy.deepcopy(strong).double()(tokens).logits, rounding_reach(strong, tokens)
        assert 1e-5 < reach < 1e-4  # beyond float32, and no more than the exception needs
        for logits in (whole, pieces):
            torch.testing.assert_close(logits.double(), exact, atol=reach, rtol=0)
    else:
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)

    strong = strong.double()  # the same computation, not a similar one
    pieces = in_pieces(strong, tokens, lengths, DynamicCache(config=strong.config))
    torch.testing.assert_close(pieces, strong(tokens).logits, atol=1e-10, rtol=0)

    torch.manual_seed(0)
    fresh = EflaForCausalLM(tiny_config(**ALL[name])).eval()  # as training starts
    pieces = in_pieces(fresh, tokens, lengths, DynamicCache(config=fresh.config))
    torch.testing.assert_close(pieces, fresh(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_a_static_cache_serves_as_well(fields):
    model, tokens = tiny_model(**fields), random_tokens(2, 23)
    cache = StaticCache(config=model.config, max_cache_len=32)
    torch.testing.assert_close(in_pieces(model, tokens, [9, 1, 13], cache), model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
@torch.no_grad()
def test_state_memory_is_the_formula_s_and_does_not_grow(fields):
    model = tiny_model(**fields)
    cache = DynamicCache(config=model.config)
    sizes = []
    for _ in range(3):
        model(random_tokens(3, 10), past_key_values=cache, use_cache=True)
        sizes.append(state_bytes(cache))
    assert sizes == [3 * accounting.state_bytes(model.config)] * 3


@torch.no_grad()
def test_a_half_precision_model_keeps_a_float32_memory():
    model = tiny_model().to(torch.bfloat16)
    cache = model(random_tokens(2, 10), use_cache=True).past_key_values
    assert cache.get_recurrent_state(0).dtype == torch.float32
    assert state_bytes(cache) == 2 * accounting.state_bytes(model.config, torch.bfloat16)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_the_cache_is_transformers_own_and_is_reordered_copied_and_reset_by_it(fields):
    model, tokens, more = tiny_model(**fields), random_tokens(3, 9), random_tokens(3, 4, seed=2)
    cache = model(tokens, use_cache=True).past_key_values
    assert type(cache) is DynamicCache

    order = torch.tensor([2, 0, 0])
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(order)
    expected = model(torch.cat([tokens[order], more], dim=1)).logits[:, 9:]
    torch.testing.assert_close(model(more, past_key_values=reordered).logits, expected, atol=1e-5, rtol=0)
    # The copy was moved on, the original was not.
    expected = model(torch.cat([tokens, more], dim=1)).logits[:, 9:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, atol=1e-5, rtol=0)

    if fields is EFLA:
        cache.reset()
        assert seen_tokens(cache) == 0
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits, atol=1e-5, rtol=0)


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
