"""Configurations: what they resolve to, what they refuse, and the presets' exact sizes."""

from __future__ import annotations

import pytest
import torch

from efla import presets, rules
from efla.models import EflaConfig, EflaForCausalLM
from efla.models.accounting import count_parameters, flops_per_token
from tests.models.tiny import ALL, random_tokens, tiny_config, tiny_model

TOTALS = {  # spec lm.md 2.2 and 7.2
    "efla-tiny": 471_296,
    "deltanet-tiny": 471_296,
    "gated-efla-tiny": 467_720,
    "gated-deltanet-tiny": 467_720,
    "mamba2-tiny": 469_284,
    "transformer-tiny": 467_584,
    "efla-340m": 374_362_112,
    "deltanet-340m": 374_362_112,
    "gated-efla-340m": 379_888_124,
    "gated-deltanet-340m": 379_888_124,
    "mamba2-340m": 382_387_712,
    "transformer-340m": 373_867_520,
    "efla-1.3b": 1_365_677_056,
    "deltanet-1.3b": 1_365_677_056,
    "mamba2-1.3b": 1_371_839_488,
    "transformer-1.3b": 1_364_297_728,
    # The spec has flame's file with 6 heads of 256; 12 heads of 128 have 6 heads' gates more and half as wide a gain.
    "gated-efla-1.3b": 1_387_348_732 + 21 * (6 * (2 * 2048 + 2) - 256),
    "gated-deltanet-1.3b": 1_387_348_732 + 21 * (6 * (2 * 2048 + 2) - 256),
}


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_has_the_specified_number_of_parameters(name):
    assert count_parameters(presets.get(name)) == TOTALS[name]


def test_every_model_comes_in_every_size():
    models = ("efla", "gated-efla", "deltanet", "gated-deltanet", "mamba2", "transformer")
    assert presets.names() == [f"{model}-{size}" for model in models for size in ("tiny", "340m", "1.3b")]


@pytest.mark.parametrize(
    ("hidden_size", "total"),
    [(1024, 512_272_124), (2048, 1_387_348_732)],
    ids=["gated_deltanet_340M", "gated_deltanet_1B"],
)
def test_flame_s_gated_files_can_be_expressed(hidden_size, total):
    wide = {"hidden_size": hidden_size, "num_heads": 6, "head_dim": 256, "value_head_dim": 512}
    assert count_parameters(presets.get("gated-deltanet-340m", **wide)) == total


@pytest.mark.parametrize(
    ("profile", "totals"),
    [("quick", (471_296, 467_720, 469_284, 467_584)), ("full", (1_881_280, 1_883_608, 1_848_958, 1_869_504))],
)
def test_the_cpu_protocol_s_arms_have_the_specified_sizes_and_match_within_two_percent(profile, totals):
    ungated, gated, mamba, attention = totals
    expected = {
        "delta-l2": ungated,
        "exact-flow": ungated,
        "gated-delta": gated,
        "gated-exact-flow": gated,
        "mamba2": mamba,
        "attention": attention,
        "delta-raw": ungated,
        "exact-flow-l2": ungated,
    }
    assert {arm: count_parameters(presets.arm(arm, profile)) for arm in presets.arms()} == expected
    assert all(abs(total / ungated - 1) < 0.02 for total in totals)


def test_arms_differ_from_their_controls_in_the_key_norm_alone():
    def key_norms(arm):
        with torch.device("meta"):
            return {layer.mixer.key_norm for layer in EflaForCausalLM(presets.arm(arm)).model.layers}

    assert key_norms("delta-l2") == key_norms("exact-flow-l2") == key_norms("gated-delta") == {True}
    assert key_norms("delta-raw") == key_norms("exact-flow") == key_norms("gated-exact-flow") == {False}


def test_an_unknown_preset_arm_or_profile_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown preset 'efla-350m'; did you mean 'efla-340m'"):
        presets.get("efla-350m")
    with pytest.raises(ValueError, match="unknown arm 'delta'; did you mean"):
        presets.arm("delta")
    with pytest.raises(ValueError, match="unknown size 'quik'; did you mean 'quick'"):
        presets.arm("delta-l2", "quik")


def test_a_pattern_of_mixers_is_repeated_and_linear_means_the_rule():
    config = EflaConfig(num_hidden_layers=8, rule="gated_efla", mixers=["linear", "linear", "mamba2", "softmax"])
    assert config.mixers == ["gated_efla", "gated_efla", "mamba2", "softmax"] * 2
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert EflaConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]).mixers == [
        "softmax",
        "efla",
    ]
    assert EflaConfig(num_hidden_layers=3).mixers == ["efla"] * 3


@pytest.mark.parametrize("rule", rules.names())
@torch.no_grad()
def test_every_rule_makes_a_model_by_name(rule):
    assert tiny_model(rule=rule)(random_tokens(1, 6)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "elfa"}, "unknown rule 'elfa'; did you mean 'efla'"),
        ({"mixers": ["linear", "softmx"]}, "unknown mixer 'softmx'; did you mean 'softmax'"),
        (
            {"mixers": ["linear", "linear", "softmax"]},
            "mixers lists 3 layers, which does not divide num_hidden_layers = 4",
        ),
        ({"num_heads": 5}, "hidden_size 32 does not divide into num_heads = 5 heads; .* or give head_dim"),
        ({"num_heads": 4, "num_key_heads": 3}, "num_heads = 4 is not a multiple of num_key_heads = 3"),
        (
            {"mixers": ["softmax"], "num_attention_heads": 5},
            "hidden_size 32 does not divide into num_attention_heads = 5",
        ),
        ({"mixers": ["softmax"], "num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads = 3"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"num_heads": 2.0}, "num_heads must be a positive integer, got 2.0"),
        ({"conv_size": 1}, r"conv_size must be 0 \(no convolution\) or at least 2, got 1"),
        ({"conv_init": "norml"}, "did you mean 'normal'"),
        ({"gate": "sigmoid"}, "unknown gate 'sigmoid'"),
        ({"num_head": 4}, "unknown key 'num_head' in EflaConfig; did you mean 'num_heads'"),
        ({"hidden_sizes": 4}, "did you mean 'hidden_size'"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_mamba_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of head_dim, got 24"):
        EflaForCausalLM(tiny_config(mixers=["mamba2"], mamba_head_dim=24))


@pytest.mark.parametrize("token", [-1, 97, 10_000])
def test_a_token_outside_the_vocabulary_is_named_before_it_is_looked_up(token):
    tokens = random_tokens(2, 5)
    tokens[1, 2] = token
    with pytest.raises(ValueError, match=rf"token id {token} is outside the vocabulary of 97"):
        tiny_model()(tokens)


def test_ids_and_embeddings_together_or_neither_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(random_tokens(1, 3), inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
def test_the_operations_of_linear_maps_are_counted_from_the_model_itself(fields):
    config = tiny_config(**fields)
    with torch.device("meta"):
        model = EflaForCausalLM(config)
    maps = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    convolutions = sum(p.numel() for name, p in model.named_parameters() if "conv.weight" in name)
    rest = flops_per_token(config) - 2 * maps - 2 * convolutions
    scans = 0
    for mixer in config.mixers:
        if mixer == "mamba2":
            scans += 6 * 64 * 8
        elif mixer == "softmax":
            scans += 4 * 32
        else:
            scans += 6 * 2 * 16 * config.value_head_dim
    assert rest == scans
