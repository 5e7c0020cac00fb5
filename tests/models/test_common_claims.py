"""What transformers' own test mixins (ModelTesterMixin, GenerationTesterMixin) claim of every model, for a tiny EFLA and a
tiny hybrid. The mixins are not in the wheel, so the claims are written anew; each test names the mixin's test it stands for.

Not applicable: head masking and pruning (v5 has none), encoder-decoder and cross-attention, vision and audio inputs,
feed-forward chunking, contrastive search and DoLa (need a key-value cache in every layer), assisted decoding for models with
a memory (tested to be refused), quantized caches, flash and flex attention and tensor parallelism (need a GPU), pipelines
(need a tokenizer), TorchScript (gone in v5). Claims of generation are in test_generation.py, of saving in
test_checkpoint.py, of caches in test_cache.py, of padding in test_padding_and_packing.py.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from efla.models import EflaForCausalLM, EflaForSequenceClassification, EflaModel
from tests.models.tiny import HYBRID, MAIN, VOCABULARY, random_tokens, tiny_config, tiny_model

both = pytest.mark.parametrize("fields", MAIN.values(), ids=MAIN)
CLASSES = [EflaModel, EflaForCausalLM, EflaForSequenceClassification]


@both
@torch.no_grad()
def test_the_same_input_gives_the_same_output(fields):  # test_determinism
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    assert torch.equal(model(tokens).logits, model(tokens).logits)


@both
@torch.no_grad()
def test_a_batch_gives_what_its_rows_give(fields):  # test_batching_equivalence
    model, tokens = tiny_model(**fields).double(), random_tokens(3, 9)
    rows = torch.cat([model(row[None]).logits for row in tokens])
    torch.testing.assert_close(model(tokens).logits, rows, atol=1e-10, rtol=0)


@both
@torch.no_grad()
def test_tuples_hold_what_dictionaries_hold(fields):  # test_model_outputs_equivalence
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    as_dict = model(tokens, output_hidden_states=True, use_cache=False)
    as_tuple = model(tokens, output_hidden_states=True, use_cache=False, return_dict=False)
    assert torch.equal(as_tuple[0], as_dict.logits)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple[1], as_dict.hidden_states, strict=True))


@both
@torch.no_grad()
def test_hidden_states_run_from_the_embedding_to_the_last_norm(fields):  # test_hidden_states_output
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    out = model(tokens, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(tokens))
    assert torch.equal(out.hidden_states[-1], model.model(tokens).last_hidden_state)
    assert model(tokens).hidden_states is None


@torch.no_grad()
def test_attention_weights_are_causal_distributions_of_the_softmax_layers():  # test_attention_outputs
    model, tokens = tiny_model(**HYBRID).double(), random_tokens(2, 9)
    sdpa = model(tokens).logits
    model.set_attn_implementation("eager")
    out = model(tokens, output_attentions=True)
    assert len(out.attentions) == 1
    weights = out.attentions[0]
    assert weights.shape == (2, 4, 9, 9)
    torch.testing.assert_close(weights.sum(-1).double(), torch.ones(2, 4, 9).double(), atol=1e-5, rtol=0)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(out.logits, sdpa, atol=1e-10, rtol=0)  # test_eager_matches_sdpa_inference


@both
@torch.no_grad()
def test_embeddings_stand_for_their_tokens(fields):  # test_inputs_embeds_matches_input_ids
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, model(tokens).logits)


@both
@pytest.mark.parametrize("kind", CLASSES)
def test_every_parameter_gets_a_gradient(fields, kind):  # test_training
    model, tokens = kind(tiny_config(num_labels=3, **fields)).train(), random_tokens(2, 9)
    if kind is EflaModel:
        loss = model(tokens).last_hidden_state.square().sum() * torch.rand(())
    else:
        loss = model(tokens, labels=tokens if kind is EflaForCausalLM else torch.tensor([0, 2])).loss
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@both
def test_gradients_reach_hidden_states(fields):  # test_retain_grad_hidden_states_attentions
    model = tiny_model(**fields)
    out = model(random_tokens(1, 6), output_hidden_states=True)
    middle = out.hidden_states[2]
    middle.retain_grad()
    out.logits[0, -1].sum().backward()
    assert middle.grad.abs().sum() > 0


@both
@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_can_grow_and_shrink(
    fields, tied
):  # test_resize_tokens_embeddings, test_resize_embeddings_untied
    model, tokens = tiny_model(tie_word_embeddings=tied, **fields), random_tokens(2, 9)
    with torch.no_grad():
        before = model(tokens).logits
        model.resize_token_embeddings(VOCABULARY + 10)
        assert model.config.vocab_size == VOCABULARY + 10
        after = model(tokens).logits
        assert after.shape[-1] == VOCABULARY + 10
        torch.testing.assert_close(after[..., :VOCABULARY], before)
        assert model(torch.full((1, 3), VOCABULARY + 9)).logits.isfinite().all()
        model.resize_token_embeddings(50)
    with pytest.raises(ValueError, match="token id 50 is outside the vocabulary of 50"):
        model(torch.tensor([[50]]))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@both
def test_copies_and_pickles_are_the_same_model(fields):  # test_model_is_small, pickling of configs and outputs
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.equal(copy.deepcopy(model)(tokens).logits, expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(tokens).logits, expected)


@both
def test_checkpointed_gradients_are_the_gradients(fields):  # test_gradient_checkpointing_enable_disable
    model, tokens = tiny_model(**fields).train(), random_tokens(2, 9)
    plain = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    calls = []
    handle = model.model.layers[0].mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    loss = model(tokens, labels=tokens).loss
    assert len(calls) == 1
    checkpointed = torch.autograd.grad(loss, list(model.parameters()))
    assert len(calls) == 2  # once more on the way back: that is what saves the memory
    handle.remove()
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@both
@torch.no_grad()
def test_logits_of_the_last_tokens_alone_are_the_same(fields):  # logits_to_keep
    model, tokens = tiny_model(**fields).double(), random_tokens(2, 9)
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, whole[:, -2:], atol=1e-10, rtol=0)
    some = torch.tensor([1, 4])
    torch.testing.assert_close(model(tokens, logits_to_keep=some).logits, whole[:, some], atol=1e-10, rtol=0)


@both
def test_half_precision_and_autocast_stay_near(fields):  # test_torch_dtype, fp16 and bf16 forward
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    with torch.no_grad():
        exact = model(tokens).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(tokens).logits.float()
        half = copy.deepcopy(model).to(torch.bfloat16)(tokens).logits.float()
    for name, logits in (("autocast", mixed), ("bfloat16", half)):
        assert (logits - exact).norm() < 0.1 * exact.norm(), name


def test_training_in_bfloat16_gives_finite_gradients():
    model, tokens = tiny_model(**HYBRID).to(torch.bfloat16).train(), random_tokens(2, 9)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_a_float32_residual_stream_is_kept_in_a_half_precision_model():
    model = tiny_model(residual_in_fp32=True).to(torch.bfloat16)
    out = model(random_tokens(1, 5), output_hidden_states=True)
    assert {h.dtype for h in out.hidden_states[1:-1]} == {torch.float32}
    assert out.logits.dtype == torch.bfloat16


@both
@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", torch.tensor([0, 2, 1])),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])),
        ("regression", torch.randn(3, 3)),
    ],
)
def test_the_classifier_takes_each_kind_of_problem(fields, problem, labels):  # test_problem_types
    torch.manual_seed(0)
    model = EflaForSequenceClassification(tiny_config(num_labels=3, problem_type=problem, **fields))
    out = model(random_tokens(3, 7), labels=labels)
    assert out.logits.shape == (3, 3)
    out.loss.backward()
    assert model.score.weight.grad.abs().sum() > 0


@both
@torch.no_grad()
def test_the_classifier_reads_the_last_real_token(fields):  # test_sequence_classification_model
    torch.manual_seed(0)
    model = EflaForSequenceClassification(tiny_config(num_labels=3, **fields)).double().eval()
    tokens = random_tokens(2, 7)
    alone = model(tokens).logits
    padded = torch.cat([tokens, torch.zeros(2, 4, dtype=torch.long)], dim=1)  # 0 is the padding token
    mask = (padded != 0).long()
    torch.testing.assert_close(model(padded, attention_mask=mask).logits, alone, atol=1e-10, rtol=0)
    left = torch.cat([torch.zeros(2, 4, dtype=torch.long), tokens], dim=1)
    torch.testing.assert_close(model(left, attention_mask=(left != 0).long()).logits, alone, atol=1e-10, rtol=0)


def test_unknown_keyword_arguments_of_softmax_attention_reach_its_function_and_no_further():
    # transformers passes its own keyword arguments through every layer; recurrent mixers take none of them.
    model, tokens = tiny_model(**HYBRID), random_tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(model(tokens, max_length_q=5).logits, model(tokens).logits)


@both
def test_a_later_token_changes_nothing_before_it(fields):
    model, tokens = tiny_model(**fields), random_tokens(1, 20)
    changed = tokens.clone()
    changed[0, 11] = (changed[0, 11] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :11], after[:, :11])
    assert (before[:, 11:] != after[:, 11:]).any(-1).all()


@both
def test_the_compiled_model_is_the_model_in_one_graph(fields):  # test_torch_compile_for_training
    model, tokens = (
        tiny_model(num_hidden_layers=2, mixers=["linear", "softmax"] if fields else None).train(),
        random_tokens(2, 9),
    )
    plain = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        plain, torch.autograd.grad(compiled(tokens, labels=tokens).loss, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    # packed input, by boundaries: their number is not known while tracing, their tensor is
    boundaries = torch.tensor([0, 4, 9, 18], dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(tokens, labels=tokens, cu_seqlens=boundaries).loss,
            model(tokens, labels=tokens, cu_seqlens=boundaries).loss,
        )


@pytest.mark.slow
@both
@torch.no_grad()
def test_inductor_compiles_the_forward_pass(fields):
    model, tokens = tiny_model(**fields), random_tokens(2, 70)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits, atol=5e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["delta-l2", "exact-flow", "gated-delta", "gated-exact-flow", "mamba2", "attention"])
def test_an_arm_learns_one_row_by_heart(arm):
    from efla import presets

    torch.manual_seed(42)
    model = EflaForCausalLM(presets.arm(arm))
    text = " ".join(f"{i} times {i + 3} is {i * (i + 3)};" for i in range(40)).encode()[:256]
    row = torch.tensor([list(text)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(150):
        loss = model(row, labels=row).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss.item() / 0.6931 < 0.1  # bits per byte
