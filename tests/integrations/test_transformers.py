"""transformers' gated-delta-rule models on efla's kernels: the same logits, the same tokens, and back again."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DataCollatorWithFlattening, DynamicCache

from efla import state
from efla.cli import main
from efla.integrations import gated_delta
from efla.integrations.transformers import FUNCTIONS, accelerate_cpu, accelerate_model
from efla.native import kernels
from efla.scans.backends import native

FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
}
# Layers of other kinds run over the boundaries of packed sequences.
REFUSED = {"qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM")}

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
EXTRA = {
    "qwen3_next": EXPERTS,
    "qwen3_5_moe": EXPERTS,
    "olmo_hybrid": {"linear_num_key_heads": 4},
    "qwen4_exp": EXPERTS
    | {"hc_lowrank": 8, "ngram_vocab_size_base": 50, "split_ngram_parts": 1, "eos_token_id": 2}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 4},
}


def small_model(family: str, **fields):
    config_name, model_name = (FAMILIES | REFUSED)[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, config_name)(**(SMALL | EXTRA.get(family, {}) | fields))
    torch.manual_seed(0)
    model = getattr(module, model_name)(config).eval()
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def random_ids(length):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def greedy_tokens(model, ids, count):
    """The tokens of greedy decoding. None of them wins by less than twice what logits may differ by."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, max_new_tokens=count, **options)
    first, second = torch.stack(out.logits).topk(2).values.unbind(-1)
    assert float((first - second).min()) > 2e-4, "a near tie, which rounding could decide: take other tokens"
    return out.sequences


@pytest.mark.parametrize("family", FAMILIES | REFUSED)
def test_same_logits_and_same_tokens(family):
    model = small_model(family)
    ids = torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
        tokens = greedy_tokens(model, ids, 12)
        with accelerate_cpu() as acceleration:
            assert family in acceleration.models
            got = model(ids).logits
            fast_tokens = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert float((got - expected).abs().max()) <= 1e-4
    assert torch.equal(fast_tokens, tokens)


@pytest.mark.skipif(kernels is None, reason="the kernels were not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("family", "kernel"), [("qwen3_5", "block_step"), ("qwen3_5_moe", "mixer_step")])
@torch.no_grad()
def test_a_cached_token_is_one_kernel_for_a_layer_and_with_experts_between_the_products(
    family, kernel, dtype, monkeypatch
):
    steps, step = [], native.step_in_place
    monkeypatch.setattr(native, "step_in_place", lambda *args: step(*args) and (steps.append(args[0]) or True))
    model = small_model(family).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) / 8)
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    states = []
    for accelerated in (False, True):
        cache = model(ids[:, :12], use_cache=True).past_key_values
        with accelerate_cpu() if accelerated else warnings.catch_warnings():
            logits = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(12, 20)]
            logits.append(model(ids[:, :3], past_key_values=cache).logits)  # goes on from the states
        kept = [x for layer in cache.layers[:3] for x in (layer.conv_states[0], layer.recurrent_states[0])]
        states.append([*logits, *kept])
        # transformers' state is float32, which the kernels do not take beside float64
        assert steps == [kernel] * (8 * 3 if accelerated and dtype == torch.float32 else 0)
    for plain, fast in zip(*states, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-6)


class Doubled(nn.Module):
    """What an adapter does to a linear map: another class with the map inside."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)


def negate(module, inputs, output):
    return -output


def double(parameter):
    parameter.mul_(2)


# A change of the model, and how many of the three layers with the rule still run as one kernel.
CHANGES = {
    "a weight": (lambda layer: double(layer.mlp.up_proj.weight), 3),
    "a norm's weight": (lambda layer: double(layer.input_layernorm.weight.add_(1)), 3),
    "an adapter": (lambda layer: setattr(layer.mlp, "up_proj", Doubled(layer.mlp.up_proj)), 2),
    "an adapter in the mixer": (
        lambda layer: setattr(layer.linear_attn, "in_proj_a", Doubled(layer.linear_attn.in_proj_a)),
        2,
    ),
    "a hook on the mixer": (lambda layer: layer.linear_attn.register_forward_hook(negate), 2),
    "a hook on the norm": (lambda layer: layer.post_attention_layernorm.register_forward_hook(negate), 2),
    "a hook on the layer": (lambda layer: layer.register_forward_hook(negate), 3),
    "another activation": (lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()), 2),
    "another forward": (lambda layer: setattr(layer.mlp, "forward", torch.neg), 2),
    "a bias": (lambda layer: setattr(layer.mlp.up_proj, "bias", nn.Parameter(torch.ones(96))), 2),
}


@pytest.mark.skipif(kernels is None, reason="the kernels were not built")
@pytest.mark.parametrize(("change", "num_whole"), CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_model_changed_between_two_tokens_runs_as_it_is(change, num_whole, monkeypatch):
    ids = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(1))
    steps, step, logits = [], native.step_in_place, []
    monkeypatch.setattr(native, "step_in_place", lambda *args: step(*args) and (steps.append(args[0]) or True))
    for accelerated in (False, True):
        model = small_model("qwen3_5")
        with accelerate_cpu() if accelerated else warnings.catch_warnings():
            cache = model(ids[:, :12], use_cache=True).past_key_values
            logits.append([model(ids[:, 12:13], past_key_values=cache).logits])
            change(model.model.layers[1])
            steps.clear()
            logits[-1].append(model(ids[:, 13:], past_key_values=cache).logits)
    assert steps.count("block_step") == num_whole
    for plain, fast in zip(*logits, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cached_token_in_bfloat16_is_as_near_to_float64_as_transformers():
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))

    def decoded(dtype):
        model = small_model("qwen3_5").bfloat16().to(dtype)
        cache = model(ids[:, :12], use_cache=True).past_key_values
        return torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(12, 20)]).double()

    exact, plain = decoded(torch.float64), decoded(torch.bfloat16)
    with accelerate_cpu():
        fast = decoded(torch.bfloat16)
    assert float((fast - exact).abs().max()) <= 2 * float((plain - exact).abs().max())


@torch.no_grad()
def test_hidden_states_and_left_padding_of_generated_tokens_are_the_same():
    model = small_model("qwen3_5")
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, output_hidden_states=True, **options)
    with accelerate_cpu():
        fast = model.generate(ids, output_hidden_states=True, **options)
    assert torch.equal(fast.sequences, plain.sequences)
    for step, other in zip(fast.hidden_states, plain.hidden_states, strict=True):
        for x, y in zip(step, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_same():
    model = small_model("qwen3_next")
    ids = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    gradients = []
    for accelerated in (False, True):
        model.zero_grad()
        with accelerate_cpu() if accelerated else warnings.catch_warnings():
            model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    scale = max(float(g.abs().max()) for g in gradients[0])
    for plain, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-5 * scale)


SEQUENCES = [random_ids(length) for length in (3, 1, 40, 25, 2)]
TOTAL = sum(map(len, SEQUENCES))
COLLATORS = {
    "positions": {},
    "cu_seq_lens": {"return_flash_attn_kwargs": True},
    "seq_idx": {"return_seq_idx": True},
    "everything": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "cu_seq_lens alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx alone": {"return_seq_idx": True, "return_position_ids": False},
}


def packed(**options):
    batch = DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in SEQUENCES])
    return {name: value for name, value in batch.items() if name != "labels"}


def logits_and_gradients(model, batches):
    """Of all tokens in a row; the gradients are those of one weighted sum of the logits."""
    model.zero_grad()
    logits = torch.cat([model(**batch).logits.flatten(0, 1) for batch in batches])
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_are_separate_sequences(family):
    model = small_model(family).double()
    with accelerate_cpu():
        alone = logits_and_gradients(model, [{"input_ids": torch.tensor([ids])} for ids in SEQUENCES])
        for options in COLLATORS.values():
            assert_same(logits_and_gradients(model, [packed(**options)]), alone)


def test_positions_may_start_anew_in_every_row_of_a_batch():
    model = small_model("qwen3_next").double()
    ids = torch.tensor([random_ids(30), random_ids(30)])
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(30 - n)]) for n in (11, 27)])
    pieces = [ids[:1, :11], ids[:1, 11:], ids[1:, :27], ids[1:, 27:]]
    with accelerate_cpu():
        together = logits_and_gradients(model, [{"input_ids": ids, "position_ids": positions}])
        assert_same(together, logits_and_gradients(model, [{"input_ids": piece} for piece in pieces]))


REFUSALS = {
    "a cache": (lambda model: {"past_key_values": DynamicCache(config=model.config)}, "packed sequences take no cache"),
    "padding": (lambda model: {"attention_mask": torch.ones(1, TOTAL)}, "take no attention_mask"),
    "other positions": (lambda model: {"position_ids": torch.arange(TOTAL)[None]}, "restart at each boundary"),
}


@pytest.mark.parametrize(("extra", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_would_run_packed_sequences_together_is_refused(extra, message):
    model = small_model("qwen3_5")
    with accelerate_cpu(), pytest.raises(ValueError, match=message):
        model(**(packed(return_flash_attn_kwargs=True) | extra(model)))


@pytest.mark.parametrize("fields", [{}, {"layer_types": ["linear_attention"] * 4, "ple_layer_ids": [1]}])
def test_a_family_with_layers_that_run_over_the_boundaries_is_refused(fields):
    model = small_model("qwen4_exp", **fields)
    with accelerate_cpu(), pytest.raises(ValueError, match="run over the boundaries"):
        model(**packed(return_flash_attn_kwargs=True))


def test_it_can_be_undone_and_done_twice():
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    model = small_model("qwen3_next")

    def replaceable():
        return [*(getattr(module, name) for name in FUNCTIONS), module.Qwen3NextModel.forward]

    def run_packed():
        try:
            return model(**packed(return_flash_attn_kwargs=True)).logits.tolist()
        except ValueError as error:  # from 5.20 on; before, transformers mixes the sequences
            return str(error)

    originals, plain = replaceable(), run_packed()
    first = accelerate_cpu()
    assert all(new is not old for new, old in zip(replaceable(), originals, strict=True))
    assert run_packed() != plain
    second = accelerate_cpu()
    assert second.models == []
    first.restore()
    assert replaceable() == originals
    assert run_packed() == plain


@pytest.mark.usefixtures("onednn_products")
def test_linear_layers_take_onednn_and_are_put_back(monkeypatch):
    model, plain = small_model("qwen3_5"), nn.Linear.forward
    ids = torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(1))
    biased, x = nn.Linear(5, 7), torch.randn(3, 5)
    expected, expected_biased = model(ids).logits, biased(x)
    with accelerate_cpu():
        torch.testing.assert_close(biased(x), expected_biased)
        monkeypatch.delattr(functional, "linear")
        logits = model(ids).logits
    monkeypatch.undo()
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    assert nn.Linear.forward is plain


def test_a_transformers_without_the_hook_is_left_alone_with_a_warning(monkeypatch):
    monkeypatch.setattr("efla.integrations.transformers._replacements", list)
    with pytest.warns(UserWarning, match="nothing was changed"):
        assert accelerate_cpu().models == []


def test_generate_and_eval_run_transformers_models_on_the_kernels(tmp_path, monkeypatch):
    folder, text = tmp_path / "qwen", tmp_path / "text.txt"
    model = small_model("qwen3_5", vocab_size=256)
    model.save_pretrained(folder)
    text.write_text("the quick brown fox\n" * 40)
    module = sys.modules[type(model).__module__]
    before = {name: getattr(module, name) for name in FUNCTIONS}
    calls, attend = [], gated_delta.linear_attention
    monkeypatch.setattr(gated_delta, "linear_attention", lambda *a, **k: calls.append(1) or attend(*a, **k))
    text_alone = [
        "--length",
        "--text",
        str(text),
        "--positions",
        "50",
        "--rows",
        "1",
        "--pairs",
        "2",
        "--lengths",
        "16",
    ]
    for command in (
        ["generate", str(folder), "--prompt", "Hello", "--max-new-tokens", "3"],
        ["eval", str(folder), *text_alone, "--output", str(tmp_path / "eval")],
    ):
        calls.clear()
        assert main(command) == 0
        assert calls, command
    assert before == {name: getattr(module, name) for name in FUNCTIONS}
    assert not accelerate_model(nn.Linear(2, 2)).models


def test_only_the_state_of_an_efla_model_can_be_kept_and_loaded(tmp_path, capsys):
    model = small_model("qwen3_5", vocab_size=256)
    with pytest.raises(
        ValueError, match=r"expected an EFLA model or its EflaConfig, got Qwen3_5ForCausalLM; only the states"
    ):
        state.load(tmp_path / "state", model)
    model.save_pretrained(tmp_path / "qwen")
    command = ["generate", str(tmp_path / "qwen"), "--prompt", "Hello", "--state", str(tmp_path / "state")]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "is a 'qwen3_5_text' model; leave --state out" in shown.err
    assert not (tmp_path / "state").exists()
