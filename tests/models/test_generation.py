"""transformers' ``generate`` in all its ways gives what recomputing everything at each step would give."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from efla import rules
from efla.models.compat import cached_states
from efla.native import rows
from efla.testing import assert_close
from tests.models.tiny import ALL, EFLA, HYBRID, MAIN, OTHERS, random_tokens, tiny_model

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def exact_model(seed=0, **fields):
    """In float64, where no two logits are so near that rounding decides which token comes next."""
    return tiny_model(seed, **fields).double()


def generate(model, tokens, **options):
    options.setdefault("attention_mask", torch.ones_like(tokens))
    return model.generate(tokens, **options)


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
def test_greedy_decoding_with_a_cache_is_greedy_decoding_without(fields):
    model, tokens = exact_model(**fields), random_tokens(2, 7)
    expected = tokens
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert len(expected[:, 7:].unique()) > 2  # a model that repeats one token would pass anything
    assert torch.equal(generate(model, tokens, **GREEDY), expected)
    assert torch.equal(generate(model, tokens, use_cache=False, **GREEDY), expected)


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3},
        {"do_sample": False, "repetition_penalty": 1.5},
        {"do_sample": False, "prefill_chunk_size": 3},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["beams", "beams-returned", "sampling", "nucleus", "penalty", "prefill-in-pieces", "static-cache"],
)
def test_generation_with_a_cache_is_generation_without(fields, options):
    model, tokens = exact_model(**fields), random_tokens(2, 7)
    torch.manual_seed(5)
    cached = generate(model, tokens, max_new_tokens=6, **options)
    torch.manual_seed(5)
    plain = {k: v for k, v in options.items() if k not in ("cache_implementation", "prefill_chunk_size")}
    assert torch.equal(cached, generate(model, tokens, max_new_tokens=6, use_cache=False, **plain))
    assert cached.shape == (2 * options.get("num_return_sequences", 1), 13)


@pytest.mark.parametrize("fields", [EFLA, HYBRID, OTHERS["everything"]], ids=["efla", "hybrid", "everything"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_left_padded_batch_gives_what_each_prompt_gives_alone(fields, num_beams):
    model = exact_model(**fields)
    lengths = [3, 9, 6]
    prompts = [random_tokens(1, length, seed=length) for length in lengths]
    batch = torch.full((3, 9), model.config.pad_token_id)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(prompts):
        batch[row, 9 - prompt.shape[1] :] = prompt
        mask[row, 9 - prompt.shape[1] :] = 1
    together = generate(model, batch, attention_mask=mask, num_beams=num_beams, **GREEDY)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt, num_beams=num_beams, **GREEDY)
        assert torch.equal(together[row, 9:], alone[0, prompt.shape[1] :])


@pytest.mark.parametrize("fields", [EFLA, HYBRID, OTHERS["mamba2"]], ids=["efla", "hybrid", "mamba2"])
@pytest.mark.parametrize("passes", ["all tokens", "new tokens"])
def test_a_conversation_goes_on_from_a_kept_cache(fields, passes):
    model, first, second = exact_model(**fields), random_tokens(1, 6), random_tokens(1, 5, seed=3)
    cache = DynamicCache(config=model.config)
    answer = generate(model, first, past_key_values=cache, **GREEDY)
    conversation = torch.cat([answer, second], dim=1)
    expected = generate(model, conversation, **GREEDY)
    # The last token of the answer has been chosen, but not read yet.
    given = conversation if passes == "all tokens" else conversation[:, answer.shape[1] - 1 :]
    goes_on = generate(model, given, past_key_values=cache, attention_mask=torch.ones_like(conversation), **GREEDY)
    assert torch.equal(goes_on[:, given.shape[1] :], expected[:, conversation.shape[1] :])


@torch.no_grad()
def test_one_prefix_serves_many_continuations():
    model, prefix = exact_model(), random_tokens(1, 10)
    kept = model(prefix, use_cache=True).past_key_values
    for seed in (1, 2):
        tokens = torch.cat([prefix, random_tokens(1, 3, seed=seed)], dim=1)
        from_kept = generate(model, tokens, past_key_values=copy.deepcopy(kept), **GREEDY)
        assert torch.equal(from_kept, generate(model, tokens, **GREEDY))


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_streamed_tokens_are_the_returned_ones(fields):
    class Streamer:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen.append(value.flatten())

        def end(self):
            self.ended = True

    model, tokens, streamer = exact_model(**fields), random_tokens(1, 5), Streamer()
    result = generate(model, tokens, streamer=streamer, **GREEDY)
    assert torch.equal(torch.cat(streamer.seen), result[0])
    assert len(streamer.seen) == 1 + 8  # the prompt, then one by one
    assert streamer.ended


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_generating_from_embeddings_is_generating_from_their_tokens(fields):
    model, tokens = exact_model(**fields), random_tokens(2, 6)
    from_embeddings = model.generate(inputs_embeds=model.get_input_embeddings()(tokens), **GREEDY)
    assert torch.equal(from_embeddings, generate(model, tokens, **GREEDY)[:, 6:])


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
def test_scores_and_logits_of_generation_are_the_model_s(fields):
    model, tokens = exact_model(**fields), random_tokens(2, 6)
    out = generate(model, tokens, return_dict_in_generate=True, output_logits=True, output_scores=True, **GREEDY)
    with torch.no_grad():
        logits = model(out.sequences).logits[:, 5:-1]
    assert out.logits[0].dtype == torch.float32
    torch.testing.assert_close(torch.stack(out.logits, dim=1).double(), logits, atol=1e-10, rtol=2**-23)
    assert torch.equal(torch.stack(out.scores, dim=1), torch.stack(out.logits, dim=1))
    assert out.past_key_values is not None


def test_generation_stops_at_the_end_token_and_pads_the_rest():
    model, tokens = exact_model(), random_tokens(2, 6)
    free = generate(model, tokens, **GREEDY)
    end = int(free[0, 9])
    stopped = generate(model, tokens, eos_token_id=end, pad_token_id=0, **GREEDY)
    first = int((free[0, 6:] == end).nonzero()[0])
    assert torch.equal(stopped[0, : 7 + first], free[0, : 7 + first])
    assert (stopped[0, 7 + first :] == 0).all()


ASSISTED = {
    "a bad draft": lambda _: {"assistant_model": exact_model(seed=1, num_hidden_layers=1, mixers=["softmax"])},
    "a good draft": lambda fields: {"assistant_model": nearly(fields)},
    "the prompt": lambda _: {"prompt_lookup_num_tokens": 3},
}


def nearly(fields):
    """The model with slightly other weights: most of its guesses are right, some are not."""
    model = exact_model(**fields)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=p.dtype) * 0.02 * p.std())
    return model


@pytest.mark.parametrize("arrange", ASSISTED.values(), ids=ASSISTED)
@pytest.mark.parametrize("fields", [*MAIN.values(), OTHERS["everything"]], ids=[*MAIN, "everything"])
def test_assisted_decoding_gives_the_tokens_of_greedy_decoding(fields, arrange):
    model, tokens = exact_model(**fields), random_tokens(1, 3).repeat(1, 30)  # longer than the log
    options = {"do_sample": False, "max_new_tokens": 16}
    assert torch.equal(generate(model, tokens, **arrange(fields), **options), generate(model, tokens, **options))


def test_a_model_of_softmax_layers_is_assisted_by_one_with_a_memory():
    model, tokens = exact_model(mixers=["softmax"]), random_tokens(1, 9)
    found = generate(model, tokens, assistant_model=exact_model(seed=1), **GREEDY)
    assert torch.equal(found, generate(model, tokens, **GREEDY))


def test_speculative_sampling_takes_back_what_it_rejects():
    model, tokens = exact_model(), random_tokens(1, 9)
    torch.manual_seed(0)
    out = generate(
        model,
        tokens,
        assistant_model=exact_model(seed=1),
        do_sample=True,
        max_new_tokens=12,
        return_dict_in_generate=True,
    )
    cache, seen = out.past_key_values, out.sequences[:, : out.past_key_values.get_seq_length()]
    with torch.no_grad():
        expected = model(seen, use_cache=True).past_key_values
    for layer in range(4):
        found = cached_states(cache, layer)
        torch.testing.assert_close(found, cached_states(expected, layer), atol=1e-10, rtol=1e-10)


def test_generation_settings_travel_with_the_model(tmp_path):
    model = exact_model()
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert generate(loaded, random_tokens(1, 4)).shape == (1, 7)


EVERY_RULE = {name: {"rule": name} for name in rules.names()} | {
    "grouped heads": {"rule": "gated_efla", "num_key_heads": 1, "value_head_dim": 24},
    "mamba2": OTHERS["mamba2"],
    "hybrid": HYBRID,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("fields", EVERY_RULE.values(), ids=EVERY_RULE)
def test_inference_gives_the_logits_of_the_oracle(fields, dtype):
    """Padded rows through ``generate`` and packed ones, against the reference scan with gradients, which takes no kernel."""
    sizes = {"num_hidden_layers": 1, **fields}
    if "mixers" in fields:
        sizes |= {"num_hidden_layers": 2, "mixers": fields["mixers"][-2:]}
    model = tiny_model(**sizes).to(dtype)
    honest = tiny_model(**sizes, backend="reference").to(dtype)
    oracle = copy.deepcopy(honest).double()
    tokens, mask = random_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    packed, boundaries = random_tokens(1, 12), torch.tensor([0, 5, 6, 12])

    def infer():
        options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
        out = model.generate(tokens, attention_mask=mask, **options)
        return out.sequences, torch.stack(out.logits, 1), model(packed, cu_seqlens=boundaries).logits

    def plain(model):
        with rows.without_kernels():
            parts = [model(part, use_cache=False).logits for part in packed.split([5, 1, 6], dim=1)]
            after = model(read, attention_mask=seen, use_cache=False).logits[:, 8:]
        return {"generated": after.detach(), "packed": torch.cat(parts, dim=1).detach()}

    found = [mode()(infer)() for mode in (torch.no_grad, torch.inference_mode)]
    for sequences, generated, from_packed in found:
        assert torch.equal(sequences, found[0][0])
        read, seen = sequences[:, :-1].clone(), torch.cat([mask, torch.ones(2, 7, dtype=torch.long)], 1)
        truth, rounded = plain(oracle), plain(honest)
        # transformers returns the logits in float32.
        narrow = torch.float32 if dtype == torch.float64 else dtype
        assert_close({"generated": generated}, {"generated": truth.pop("generated")}, rounded, precision=narrow)
        assert_close({"packed": from_packed}, truth, rounded)
