"""The two backbones: parameter totals, initial weights, positions read, padding of nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from efla.experiments.arms import ARMS
from efla.experiments.experiment import Group
from efla.experiments.mad.config import TASK_ORDER, UNSOLVED, MadConfig, profile
from efla.experiments.mad.exact import IGNORE
from efla.experiments.mad.model import AutoEncoder, LanguageModel, build, loss_of, mixer, sinusoid
from efla.experiments.mad.tasks import baseline, changed, generate
from efla.layers import LinearAttention, SwiGLU
from efla.layers.blocks import swiglu_width
from efla.models.accounting import parameter_count

UNGATED = ("delta-l2", "exact-flow", "delta-raw", "exact-flow-l2", "rk2", "rk4", "implicit-euler", "crank-nicolson")
FULL = profile("full")


@pytest.mark.parametrize("arm", UNGATED)
def test_ungated_recurrent_arms_have_the_stated_parameters(arm: str) -> None:
    assert parameter_count(mixer(arm, 128, 4)) == 67_616
    assert parameter_count(build(FULL, baseline("in-context-recall"), arm, 0)) == 410_320
    assert parameter_count(build(FULL, baseline("compression"), arm, 0)) == 443_600


def test_parts_have_the_stated_parameters() -> None:
    assert swiglu_width(128, 16) == 352 and swiglu_width(64, 16) == 176
    assert parameter_count(SwiGLU(128, 352)) == 135_168
    assert parameter_count(mixer("attention", 128, 4)) == 4 * (128 * 128 + 128)
    # in_proj to 2 * 256 + 2 * 16 + 8, convolution with bias on 288 channels, A_log, dt_bias, D, norm, out_proj
    assert parameter_count(mixer("mamba2", 128, 4)) == 128 * 552 + 288 * 5 + 3 * 8 + 256 + 256 * 128
    # gate of 4 heads (linear, rate, bias) and output gate
    for arm in ("gated-delta", "gated-exact-flow"):
        assert parameter_count(mixer(arm, 128, 4)) == 67_616 + 128 * 4 + 8 + 128 * 128


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_the_rule_and_key_norm_of_its_name(arm: str) -> None:
    built = mixer(arm, 128, 4)
    if isinstance(built, LinearAttention):
        assert (built.rule.name, built.key_norm) == (ARMS[arm].rule, ARMS[arm].l2_keys)
        assert built.query_norm and built.head_dim == built.value_head_dim == 32
        assert (built.g_proj is not None) == arm.startswith("gated")


def test_arms_with_equal_parameters_start_with_equal_weights() -> None:
    models = [build(FULL, baseline("memorization"), arm, 12345).state_dict() for arm in UNGATED]
    for other in models[1:]:
        assert all(torch.equal(models[0][name], other[name]) for name in models[0])
    changed_seed = build(FULL, baseline("memorization"), "exact-flow", 12346).state_dict()
    assert not torch.equal(models[0]["head.weight"], changed_seed["head.weight"])


def test_initial_weights_are_as_told() -> None:
    language = build(FULL, baseline("memorization"), "exact-flow", 0)
    assert isinstance(language, LanguageModel)
    assert float(language.encoder.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    weight = language.head.weight
    assert float(weight.detach().abs().max()) == pytest.approx(128**-0.5, rel=0.01)
    assert not language.head.bias.any()
    coder = build(FULL, baseline("compression"), "exact-flow", 0)
    for module in coder.modules():
        if isinstance(module, torch.nn.Linear):
            assert float(module.weight.detach().std()) == pytest.approx(0.02, rel=0.15)
            assert module.bias is None or not module.bias.any()


def test_the_sinusoid_is_the_formula() -> None:
    table = sinusoid(5, 8)
    for j in range(5):
        for i in range(4):
            angle = j * 10_000 ** (-i / 3)
            assert float(table[j, i]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(table[j, 4 + i]) == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("task", ["selective-copying", "compression"])
def test_reading_only_the_targets_gives_the_logits_and_gradients_of_reading_all(task: str) -> None:
    setting = replace(baseline(task), num_train_examples=3, num_test_examples=1)
    if task == "selective-copying":
        setting = replace(setting, seq_len=40, num_tokens_to_copy=4)
    data = generate(setting)
    model = build(replace(FULL, backend="chunked"), setting, "exact-flow", 0).double()
    targets = data.train_targets.clone()
    targets[:, ::3] = IGNORE
    gradients = []
    for masked_late in (False, True):
        model.zero_grad()
        if masked_late:
            logits = model(data.train_inputs)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE)
        else:
            loss = loss_of(model, data.train_inputs, targets)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-14)


def test_the_auto_encoder_sees_the_sequence_through_one_vector_only() -> None:
    model = AutoEncoder("exact-flow", 16, 128, 4, 32)
    tokens = torch.randint(15, (2, 32))
    tokens[:, -1] = 15
    logits = model(tokens).view(2, 32, 16)
    encoding = model.encoder.last(model.encoder(tokens)[:, -1])
    again = torch.stack([model.decoder(encoding + model.sinusoid[j]) for j in range(32)], 1)
    torch.testing.assert_close(logits, again)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_causal_and_has_gradients_everywhere(arm: str) -> None:
    config = replace(profile("quick"), backend="auto")
    setting = changed("in-context-recall", "seq_len", 32)
    model = build(config, setting, arm, 0)
    tokens = torch.randint(16, (2, 31))
    later = tokens.clone()
    later[:, 20:] = (later[:, 20:] + 1) % 16
    one, other = (model(x).view(2, 31, 16)[:, :20] for x in (tokens, later))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    loss_of(model, tokens, later).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "multiple of 3 heads"),
        ({"steps": None}, "steps or as epochs"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"schedule": "linear"}, "constant"),
        ({"groups": (Group(("exactflow",), (1e-3,), (1,), settings=("memorization/baseline",)),)}, "exact-flow"),
        ({"groups": (Group(("exact-flow",), (1e-3,), (1,), settings=("memorization/V3",)),)}, "memorization/V1024"),
        ({"groups": (Group(("exact-flow",), (0.0,), (1,), settings=("memorization/baseline",)),)}, "must be positive"),
    ],
)
def test_impossible_configs_are_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FULL, **changes)  # type: ignore[arg-type]


def test_the_profiles_have_the_stated_cells() -> None:
    from efla.experiments.mad.run import Mad

    def counts(config: MadConfig) -> tuple[int, int]:
        cells = Mad(config).cells()
        return len(cells), len({(cell.settings["task"], cell.settings["setting"]) for cell in cells})

    assert counts(profile("quick")) == (12, 6)
    assert counts(profile("full")) == (12 * 3 * 2 + 6 * 2 * 2 * 2 + 2 * 2 * 2 * (5 + 8), 12)
    assert counts(profile("reference")) == (396 * 7, 66)
    quick = profile("quick")
    steps = {task: quick.steps_of(quick.setting(task, "short")) for task in ("memorization", "compression")}
    assert steps == {"memorization": 400, "compression": 600}
    full = profile("full")
    assert {group.rates for group in full.groups} == {(5e-4, 1e-3)} and {group.decays for group in full.groups} == {
        (0.0,)
    }
    seeds: dict[tuple[str, ...], set[int]] = {}
    for group in full.groups:
        seeds.setdefault(group.arms, set()).update(group.seeds)
    assert seeds == {
        ("delta-l2", "exact-flow", "delta-raw"): {12345},
        ("delta-l2", "exact-flow"): set(range(12346, 12353)),
        ("gated-delta", "gated-exact-flow"): set(range(12345, 12353)),
    }
    assert {group.settings for group in full.groups if 12352 in group.seeds} == {UNSOLVED}
    hard = {
        cell.settings["task"]: cell.settings["setting"]
        for cell in Mad(full).cells()
        if cell.settings["setting"] != "baseline"
    }
    assert hard == {
        "in-context-recall": "V64", "noisy-in-context-recall": "noise0.6", "fuzzy-in-context-recall": "L256",
        "selective-copying": "copy32", "compression": "L64", "memorization": "V1024",
    }  # fmt: skip
    sizes = {c.profile: (c.width, c.heads, c.batch, c.memorization_batch, c.evaluate_every) for c in (quick, full)}
    assert sizes == {"quick": (64, 2, 32, 16, 200), "full": (128, 4, 32, 32, 500)}
    short = {task: quick.setting(task, "short") for task in TASK_ORDER}
    assert {(s.num_train_examples, s.num_test_examples) for s in short.values() if s.task != "memorization"} == {
        (3200, 320)
    }
    assert (short["memorization"].num_train_examples, short["memorization"].vocab_size) == (64, 64)
    assert (short["selective-copying"].seq_len, short["selective-copying"].num_tokens_to_copy) == (64, 8)
    assert (short["compression"].seq_len, short["in-context-recall"].seq_len) == (16, 64)
    reference = profile("reference")
    group = reference.groups[0]
    assert (group.rates, group.decays, group.seeds) == ((1e-4, 5e-4, 1e-3), (0.0, 0.1), (12345,))
    assert (reference.batch, reference.epochs, reference.evaluate_every) == (128, 200, None)
    assert (reference.precision, profile("reference", device="cuda").precision) == ("float32", "bfloat16")
    assert reference.steps_of(reference.setting("memorization", "baseline")) == 400
    assert reference.steps_of(reference.setting("in-context-recall", "train800")) == 7 * 200
