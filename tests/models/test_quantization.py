"""float16 and int8 weights: no less precise than their rounding, in every model, and refused where they cannot work."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from efla.layers.linear import PackedLinear
from efla.models import EflaForCausalLM
from efla.models.accounting import parameter_count
from efla.models.loading import load_model
from efla.models.quantization import WEIGHTS, CpuWeightsConfig, pack_linears
from efla.testing import assert_close
from tests.models.tiny import ALL, HYBRID, exact_and_rounded, random_tokens, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model(vocab_size=256).save_pretrained(tmp_path)
    return tmp_path


def random_linear(bias):
    torch.manual_seed(0)
    linear = nn.Linear(77, 45, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-3, 3, 45)[:, None])
        linear.weight[7] = 0
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
@torch.no_grad()
def test_float16_rounds_the_weights_and_nothing_else(bias, rows):
    linear, x = random_linear(bias), torch.randn(2, rows, 77)
    found = PackedLinear(linear, "float16")(x)
    linear.weight.copy_(linear.weight.half())
    exact = copy.deepcopy(linear).double()(x.double())
    size = x.double().abs() @ linear.weight.double().abs().T  # what a sum in float32 is rounded by
    assert ((found - exact).abs() <= 80 * 2**-24 * (size + exact.abs())).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
@torch.no_grad()
def test_int8_rounds_the_weights_of_each_output_to_8_bits_and_nothing_else(bias, rows):
    linear, x = random_linear(bias), torch.randn(2, rows, 77) + 1
    packed = PackedLinear(linear, "int8")
    found, x = packed(x), x.double()
    weight = linear.weight.double()
    step = weight.abs().amax(1, keepdim=True) / 127
    rounded = torch.where(step > 0, (weight / step).round() * step, 0)
    assert (packed.weight[:, :77].abs().amax(1) == torch.where(step[:, 0] > 0, 127, 0)).all()
    size = x.abs() @ rounded.abs().T  # what a sum in float32 is rounded by
    exact = x @ rounded.T + (0 if linear.bias is None else linear.bias.double())
    assert ((found - exact).abs() <= 80 * 2**-24 * (size + exact.abs())).all()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_a_packed_model_is_the_model_with_rounded_weights_in_one_pass_and_token_by_token(name, weights):
    model, tokens = tiny_model(**ALL[name]), random_tokens(2, 23)
    packed = pack_linears(copy.deepcopy(model), weights)
    for path, module in model.named_modules():
        if isinstance(linear := packed.get_submodule(path), PackedLinear):
            module.weight.copy_(linear(torch.eye(module.in_features)).T)
    exact, honest = exact_and_rounded(model, tokens)
    cache = DynamicCache(config=model.config)
    pieces = [packed(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split([9, *[1] * 14], 1)]
    found = {"whole": packed(tokens).logits, "pieces": torch.cat(pieces, 1)}
    assert_close(found, dict.fromkeys(found, exact), dict.fromkeys(found, honest))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "fields", [HYBRID, {"rule": "gated_efla", "tie_word_embeddings": True}], ids=["hybrid", "gated-tied"]
)
def test_from_pretrained_packs_every_wide_linear_map_and_generates(fields, weights, tmp_path):
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    model.save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=CpuWeightsConfig(weights))
    assert type(packed) is EflaForCausalLM and packed.dtype == torch.float32
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kind = PackedLinear if module.out_features >= 32 else nn.Linear
            assert type(packed.get_submodule(path)) is kind, path
    assert not any(p.requires_grad for p in packed.parameters())
    assert torch.equal(packed.model.embed_tokens.weight, model.model.embed_tokens.weight)
    expected, found = model(tokens).logits, packed(tokens).logits
    assert (found - expected).norm() < (0.01 if weights == "float16" else 0.3) * expected.norm()
    longer = packed.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False)
    assert longer.shape == (2, 14)
    assert torch.equal(copy.deepcopy(packed)(tokens).logits, found)


def test_what_packed_weights_cannot_do_is_refused(folder):
    with pytest.raises(ValueError, match=r"unknown format of weights 'int4'; .*known .*: float16, int8"):
        CpuWeightsConfig("int4")
    with pytest.raises(ValueError, match="run on the CPU only, got device_map"):
        EflaForCausalLM.from_pretrained(folder, quantization_config=CpuWeightsConfig(), device_map={"": "cuda:0"})
    packed = EflaForCausalLM.from_pretrained(
        folder, quantization_config={"quant_method": "efla_cpu", "weights": "int8"}
    )
    with pytest.raises(ValueError, match="not serializable"):
        packed.save_pretrained(folder / "again")
    with pytest.raises(RuntimeError, match="int8 weights have no backward pass; load the model without them"):
        packed(inputs_embeds=torch.zeros(1, 3, 32, requires_grad=True))
    linear = nn.Linear(40, 40)
    linear.weight.data[1, 2] = torch.inf
    with pytest.raises(ValueError, match="not finite as int8"):
        PackedLinear(linear, "int8")
    with pytest.raises(ValueError, match=r"Sequential has no torch\.nn\.Linear to store as int8"):
        pack_linears(nn.Sequential(nn.ReLU()), "int8")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_packed_parameters_are_counted_once(weights, tied):
    model = tiny_model(tie_word_embeddings=tied, vocab_size=64)
    count = sum(p.numel() for p in model.parameters())
    assert parameter_count(pack_linears(model, weights)) == count


@pytest.mark.parametrize("has_instructions", [False, True])
def test_a_bfloat16_checkpoint_runs_in_float32_where_the_cpu_is_slower_with_it(
    has_instructions, folder, monkeypatch, caplog
):
    tiny_model(vocab_size=256).bfloat16().save_pretrained(folder)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    with caplog.at_level(logging.WARNING, logger="efla"):
        assert load_model(str(folder)).model.dtype == (torch.bfloat16 if has_instructions else torch.float32)
    said = [record.getMessage() for record in caplog.records if record.name == "efla"]
    assert said == (
        []
        if has_instructions
        else [f"{folder} is bfloat16, which this CPU has no instructions for; it runs in float32"]
    )
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_model(str(folder), weights="int8").model.dtype == torch.float32


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_model_with_smaller_weights_is_not_moved_in_part(weights):
    model = tiny_model()
    pack_linears(model, weights)
    assert model.to("cpu") is model
    with pytest.raises(RuntimeError, match=f"{weights} weights stay on the CPU"):
        model.to("meta")
