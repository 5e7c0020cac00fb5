"""A state saved, loaded, forked, merged, rewound or shared by prompts is the state of the tokens it stands for."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from efla import state
from efla.models.cache import REWINDABLE, RewindableLayer, seen_tokens
from efla.models.quantization import pack_linears
from tests.models.tiny import ALL, HYBRID, MAIN, OTHERS, random_tokens, tiny_config, tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
RECURRENT = {name: fields for name, fields in ALL.items() if name != "softmax"}
SOME = {**MAIN, **{name: OTHERS[name] for name in ("everything", "no-convolution", "softmax")}}


@torch.no_grad()
def after(model, tokens, lengths=None, *, record=False):
    """The cache after tokens [B, T], read in pieces."""
    cache = DynamicCache(config=model.config)
    if record:
        cache.activate_past_recording()
    for piece in tokens.split(lengths or tokens.shape[1], dim=1):
        model(piece, past_key_values=cache, use_cache=True)
    return cache


def held(cache):
    """What a cache holds: every tensor of every layer, and how many tokens it has seen."""
    return copy.deepcopy({**state._tensors(cache), "seen": torch.tensor(seen_tokens(cache))})


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", SOME.values(), ids=SOME)
@torch.no_grad()
def test_a_loaded_state_goes_on_as_the_saved_one(fields, dtype, tmp_path):
    model, more = tiny_model(**fields).to(dtype), random_tokens(2, 3, seed=2)
    cache = after(model, random_tokens(2, 11))
    expected = held(cache)
    state.save(cache, tmp_path / "a.safetensors")
    loaded = state.load(tmp_path / "a.safetensors", model)
    assert_same(held(loaded), expected)
    assert torch.equal(model(more, past_key_values=loaded).logits, model(more, past_key_values=cache).logits)
    assert seen_tokens(loaded) == loaded.get_seq_length() == 14
    by_config = state.load(tmp_path / "a.safetensors", model.config)
    assert_same(held(by_config), expected)
    state.save(loaded, tmp_path / "b.safetensors")  # the model is known from the load on
    assert seen_tokens(state.load(tmp_path / "b.safetensors", model)) == 14


@torch.no_grad()
def test_the_file_does_not_grow_with_the_tokens(tmp_path):
    model = tiny_model()
    sizes = []
    for length in (5, 500):
        state.save(after(model, random_tokens(1, length)), tmp_path / "a")
        sizes.append((tmp_path / "a").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 16  # the number of tokens in the header


BAD = {
    "another size": (
        lambda: tiny_model(hidden_size=64),
        r"another model: head_dim is 16 there, 32 here \(3 fields differ\)",
    ),
    "another rule": (
        lambda: tiny_model(rule="delta"),
        r"mixers is \['efla', .* there, \['delta', .* here .*; load it with the",
    ),
    "another dtype": (
        lambda: tiny_model().bfloat16(),
        r"another dtype: float32 there, bfloat16 here; load it with the checkpoint that saved it, in torch\.float32",
    ),
    "other weights": (lambda: tiny_model(seed=1), r"same configuration and other weights; load it with the checkpoint"),
    "packed weights": (lambda: pack_linears(tiny_model(), "int8"), "same configuration and other weights"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_a_state_of_another_model_is_refused_by_name(make, message, tmp_path):
    model = tiny_model()
    state.save(after(model, random_tokens(1, 5)), tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        state.load(tmp_path / "a", make())


def test_a_state_of_other_packed_weights_is_refused(tmp_path):
    model, finetuned, scaled = tiny_model(), tiny_model(), tiny_model()
    with torch.no_grad():
        finetuned.model.layers[0].mixer.v_proj.weight += torch.randn(1)
        scaled.model.layers[0].mixer.v_proj.weight *= 2  # the same int8 numbers
    packed = pack_linears(model, "int8")
    others = pack_linears(finetuned, "int8"), pack_linears(scaled, "int8"), pack_linears(tiny_model(), "float16")
    cache = after(packed, random_tokens(1, 5))
    state.save(cache, tmp_path / "a")
    state.load(tmp_path / "a", pack_linears(tiny_model(), "int8"))
    for other in others:
        with pytest.raises(ValueError, match="same configuration and other weights"):
            state.load(tmp_path / "a", other)
        with pytest.raises(ValueError, match="other weights"):
            state.merge([cache, after(other, random_tokens(1, 5))])


def test_what_does_not_change_the_layers_does_not_matter(tmp_path):
    model = tiny_model()
    state.save(after(model, random_tokens(1, 5)), tmp_path / "a")
    state.load(tmp_path / "a", tiny_config(backend="chunked", eos_token_id=5, loss_chunk_size=7))


def test_a_damaged_or_changed_file_is_refused(tmp_path):
    model, file = tiny_model(), tmp_path / "a"
    state.save(after(model, random_tokens(1, 5)), file)
    whole = file.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"is damaged .*; save the state again"):
            state.load(file, model)
    for old, new in ((b'"tokens":"5"', b'"tokens":"6"'), (whole[-4:], bytes(4))):
        assert old in whole
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="was changed after it was saved"):
            state.load(file, model)
    save_file({"x": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match=r"no state that efla\.state\.save wrote"):
        state.load(file, model)


def test_a_refused_save_leaves_the_old_file(tmp_path):
    model, file = tiny_model(), tmp_path / "a"
    state.save(after(model, random_tokens(1, 5)), file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="read nothing yet"):
        state.save(DynamicCache(config=model.config), file)
    with pytest.raises(ValueError, match="not filled by an efla model"):
        state.save(state.load(file, model.config), file)
    static = StaticCache(config=tiny_config(**HYBRID), max_cache_len=8)
    with torch.no_grad():
        tiny_model(**HYBRID)(random_tokens(1, 5), past_key_values=static)
    with pytest.raises(ValueError, match=r"layer 3 of the cache is a StaticLayer; only the state in a DynamicCache"):
        state.save(static, file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("fields", SOME.values(), ids=SOME)
@torch.no_grad()
def test_a_fork_goes_its_own_way(fields):
    model, tokens, more = tiny_model(**fields), random_tokens(2, 9), random_tokens(4, 3, seed=2)
    cache = after(model, tokens)
    before = held(cache)
    forked = state.fork(cache, 2)
    rows = {name: x.repeat_interleave(2, dim=0) if x.dim() else x for name, x in before.items()}
    assert_same(held(forked), rows)
    model(more, past_key_values=forked)
    assert (seen_tokens(forked), forked.get_seq_length(), seen_tokens(cache)) == (12, 12, 9)
    assert_same(held(cache), before)
    merged = state.merge([state.select(forked, torch.tensor([0])), state.select(forked, torch.tensor([3, 1]))])
    assert_same(held(merged), held(state.select(forked, torch.tensor([0, 3, 1]))))


@pytest.mark.parametrize("fields", [*MAIN.values(), OTHERS["everything"]], ids=[*MAIN, "everything"])
@torch.no_grad()
def test_a_selection_of_a_static_cache_goes_its_own_way(fields):
    model, tokens, more = tiny_model(**fields).double(), random_tokens(2, 9), random_tokens(2, 3, seed=2)
    expected, rows = model(torch.cat([tokens, more], dim=1)).logits[:, 9:], torch.tensor([1, 0])
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(tokens, past_key_values=cache)
    selected = state.select(cache, rows)
    logits = model(more[rows], past_key_values=selected).logits
    assert (seen_tokens(selected), seen_tokens(cache)) == (12, 9)
    torch.testing.assert_close(logits, expected[rows], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, atol=1e-10, rtol=1e-10)


def test_what_cannot_be_forked_is_refused():
    model = tiny_model(**HYBRID)
    with pytest.raises(ValueError, match="count must be at least 1"):
        state.fork(after(model, random_tokens(1, 4)), 0)
    for empty in (DynamicCache(config=model.config), DynamicCache()):
        with pytest.raises(ValueError, match=r"read nothing yet; there is no state to fork\. Run the model"):
            state.fork(empty, 2)
    static = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(random_tokens(1, 5), past_key_values=static)
    with pytest.raises(ValueError, match=r"layer 3 of the cache is a StaticLayer; only the state in a DynamicCache"):
        state.fork(static, 2)


UNLIKE = {
    "another rule": (
        lambda: tiny_model(rule="delta"),
        r"another model: mixers is \['delta', .* there, \['efla', .* here .*",
    ),
    "another dtype": (lambda: tiny_model().bfloat16(), r"another dtype: bfloat16 there, float32 here"),
    "other weights": (lambda: tiny_model(seed=1), r"a model with the same configuration and other weights"),
}


@pytest.mark.parametrize(("make", "message"), UNLIKE.values(), ids=UNLIKE)
def test_states_of_two_models_cannot_be_merged(make, message, tmp_path):
    model, other = tiny_model(), make()
    caches = [
        after(model, random_tokens(1, 4)),
        after(tiny_model(), random_tokens(1, 4)),
        after(other, random_tokens(1, 4)),
    ]
    with pytest.raises(
        ValueError, match=rf"parts\[2\] cannot be merged with parts\[0\]: .*{message}; merge caches of one"
    ):
        state.merge(caches)
    same = copy.deepcopy(model)  # another object, but the same model
    assert seen_tokens(state.merge([caches[0], after(same, random_tokens(2, 4))])) == 4
    state.save(caches[2], tmp_path / "a")
    loaded = state.load(tmp_path / "a", other)
    with pytest.raises(ValueError, match=message):
        state.merge([caches[0], loaded])


def test_what_cannot_be_merged_is_refused(tmp_path):
    model = tiny_model(**HYBRID)
    with pytest.raises(ValueError, match="with softmax layers those of one length"):
        state.merge([after(model, random_tokens(1, 4)), after(model, random_tokens(1, 5))])
    with pytest.raises(ValueError, match="at least one cache to merge, got none"):
        state.merge([])
    with pytest.raises(ValueError, match="there is no state to merge"):
        state.merge([after(model, random_tokens(1, 4)), DynamicCache(config=model.config)])
    parts = []
    for dtype in (torch.float32, torch.bfloat16):  # of models that are not known
        model = tiny_model().to(dtype)
        state.save(after(model, random_tokens(1, 4)), tmp_path / "a")
        parts.append(state.load(tmp_path / "a", model.config))
    with pytest.raises(
        ValueError, match=r"layers\.0\.conv is torch\.bfloat16 \[96, 3\] there, torch\.float32 \[96, 3\] here"
    ):
        state.merge(parts)


# Taking tokens back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fields", RECURRENT.values(), ids=RECURRENT)
@torch.no_grad()
def test_tokens_read_one_by_one_leave_no_trace_when_taken_back(fields, dtype):
    # The same calls as without them, so the same bits.
    model, tokens = tiny_model(**fields).to(dtype), random_tokens(2, 30)
    lengths = [5, *[1] * 25]
    cache = after(model, tokens, lengths, record=True)
    for back in (1, 2, 7, 11):  # 29, 27, 20, 9 tokens left
        cache.crop(-back)
        left = seen_tokens(cache)
        plain = after(model, tokens[:, :left], lengths[: left - 4])
        assert_same(held(cache), held(plain))
    rest = tokens[:, 9:].split(1, dim=1)
    for token in rest:
        assert torch.equal(model(token, past_key_values=cache).logits, model(token, past_key_values=plain).logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fields", [*MAIN.values(), OTHERS["everything"]], ids=[*MAIN, "everything"])
@torch.no_grad()
def test_whole_calls_leave_no_trace_when_taken_back(fields, dtype):
    model, tokens = tiny_model(**fields).to(dtype), random_tokens(2, 40)
    for lengths, calls in (([5, 7, 3], 1), ([5, 7, 3], 2), ([10, 20, 5], 2), ([20, 1, 1, 6], 2), ([3] * 5, 3)):
        cache = after(model, tokens[:, : sum(lengths)], lengths, record=True)
        cache.crop(-sum(lengths[-calls:]))
        assert_same(held(cache), held(after(model, tokens[:, : sum(lengths[:-calls])], lengths[:-calls])))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("fields", [*MAIN.values(), OTHERS["everything"]], ids=[*MAIN, "everything"])
@torch.no_grad()
def test_any_of_the_last_tokens_of_a_call_can_be_taken_back(fields):
    # In float64: a matrix product of another height may round otherwise.
    model, tokens = tiny_model(**fields).double(), random_tokens(2, 150)
    for lengths, back in (([150], 1), ([150], REWINDABLE), ([10, 20], 19), ([10, 20], 25), ([10], 10), ([3] * 40, 63)):
        total = sum(lengths)
        cache = after(model, tokens[:, :total], lengths, record=True)
        cache.crop(-back)
        if back < total:
            assert_close(held(cache), held(after(model, tokens[:, : total - back])))
        assert seen_tokens(cache) == total - back
        logits = model(tokens[:, total - back : total], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(tokens[:, :total]).logits[:, -back:], atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_padding_that_was_read_is_taken_back_too():
    model, tokens = tiny_model().double(), random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(tokens, attention_mask=mask, past_key_values=cache)
    cache.crop(-6)
    expected = model(tokens[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    assert_close(held(cache), held(expected))


@pytest.mark.parametrize("fields", [HYBRID, {"mixers": ["softmax", "linear"]}], ids=["softmax last", "softmax first"])
def test_a_crop_beyond_the_log_changes_nothing_and_says_what_to_do(fields):
    model = tiny_model(**fields)
    for record, known in ((False, 0), (True, REWINDABLE)):
        cache = after(model, random_tokens(1, 100), record=record)
        before = held(cache)
        with pytest.raises(
            ValueError, match=rf"cannot take back 80 tokens: .* holds {known}\. .*activate_past_recording"
        ):
            cache.crop(-80)
        with pytest.raises(ValueError, match="crop takes minus the number of tokens"):
            cache.crop(3)
        with pytest.raises(TypeError, match="float"):
            cache.crop(-1.5)
        cache.crop(0)
        assert_same(held(cache), before)


@torch.no_grad()
def test_the_log_is_bounded_and_off_unless_asked_for():
    model, tokens = tiny_model(num_hidden_layers=1), random_tokens(1, 300)
    assert not any(isinstance(layer, RewindableLayer) for layer in after(model, tokens[:, :5], [1] * 5).layers)
    for lengths in ([1] * 150, [2] * 80, [7] * 25, [100, *[1] * 40]):
        layer = after(model, tokens[:, : sum(lengths)], lengths, record=True).layers[0]
        assert REWINDABLE <= layer.rewindable < 2 * REWINDABLE
        assert len(layer.segments) <= REWINDABLE // 8 + 2


@torch.no_grad()
def test_a_copy_of_a_recording_cache_is_rewound_alone():
    model, tokens = tiny_model(), random_tokens(1, 20)
    cache = after(model, tokens, [1] * 20, record=True)
    before, copied = held(cache), copy.deepcopy(cache)
    copied.crop(-5)
    assert_same(held(copied), held(after(model, tokens[:, :15], [1] * 15)))
    assert (copied.get_seq_length(), cache.get_seq_length()) == (15, 20)
    assert_same(held(cache), before)


# Prefixes


@pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
@torch.no_grad()
def test_a_prompt_read_from_a_stored_prefix_is_read_as_a_whole(fields):
    model, prefix = tiny_model(**fields), random_tokens(1, 30)
    prefixes = state.PrefixCache(model, every=8)
    calls = []
    model.register_forward_pre_hook(lambda *_, **kwargs: calls.append(1))
    for seed, length, num_calls in ((2, 10, 5), (3, 10, 2), (3, 10, 1), (4, 3, 1)):
        tokens = torch.cat([prefix, random_tokens(1, length, seed=seed)], dim=1)
        calls.clear()
        found = held(prefixes.read(tokens))
        assert len(calls) == num_calls
        assert_same(found, held(state.PrefixCache(model, every=8).read(tokens)))  # bit for bit
        torch.testing.assert_close(found, held(after(model, tokens[:, :-1])), atol=1e-4, rtol=1e-4)
    exact = tiny_model(**fields).double()
    found = exact.generate(tokens, past_key_values=state.PrefixCache(exact, every=8).read(tokens), max_new_tokens=5)
    assert torch.equal(found, exact.generate(tokens, max_new_tokens=5))


@torch.no_grad()
def test_prefixes_used_longest_ago_are_dropped():
    model = tiny_model()
    prompts = [random_tokens(1, 9, seed=seed) for seed in range(3)]
    size = sum(x.numel() * x.element_size() for x in state._tensors(after(model, prompts[0])).values())
    prefixes = state.PrefixCache(model, every=8, max_bytes=2 * size)
    for number in (0, 1, 0, 2):
        prefixes.read(prompts[number])
    assert len(prefixes) == 2 and prefixes.num_bytes == 2 * size
    known = [prefixes._keys(prompt[0, :-1])[0] in prefixes._states for prompt in prompts]
    assert known == [True, False, True]
    prefixes.clear()
    assert len(prefixes) == prefixes.num_bytes == 0
    with pytest.raises(ValueError, match=r"tokens must have shape \[1, T\], got \[2, 9\]"):
        prefixes.read(random_tokens(2, 9))
