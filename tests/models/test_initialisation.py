"""How models start: the specification's distributions, equal for arms of equal shape, and a loss of ln V."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from efla import presets
from efla.layers import LinearAttention, Mamba2, RMSNorm, ShortConvolution
from efla.models import EflaForCausalLM

PAIRS = [
    ("delta-l2", "exact-flow"),
    ("delta-l2", "delta-raw"),
    ("exact-flow", "exact-flow-l2"),
    ("gated-delta", "gated-exact-flow"),
]


def build(arm, seed=42, **overrides):
    torch.manual_seed(seed)
    return EflaForCausalLM(presets.arm(arm, **overrides))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_arms_of_equal_shape_start_from_equal_parameters(one, other):
    first, second = build(one).state_dict(), build(other).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    again = build(one, seed=43).state_dict()
    assert not torch.equal(first["model.embed_tokens.weight"], again["model.embed_tokens.weight"])


@pytest.mark.parametrize("arm", presets.arms())
@pytest.mark.parametrize("conv_init", ["default", "normal"])
def test_every_parameter_starts_as_specified(arm, conv_init):
    model = build(arm, conv_init=conv_init)
    seen = set()
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear) and not name.endswith("out_proj")) or isinstance(module, nn.Embedding):
            check_normal(module.weight)
        elif isinstance(module, RMSNorm):
            assert (module.weight == 1).all()
        elif isinstance(module, ShortConvolution):
            if conv_init == "normal":
                check_normal(module.weight)
            else:
                assert 0.45 < module.weight.abs().max() <= 0.5
                assert abs(module.weight.std() - 1 / math.sqrt(12)) < 0.03
            assert module.bias is None or (module.bias == 0).all()
        elif isinstance(module, (LinearAttention, Mamba2)) and module.A_log is not None:
            low = 1.0 if isinstance(module, Mamba2) else 1e-4
            assert (module.A_log.exp() >= low - 1e-6).all()
            assert (module.A_log.exp() <= 16.001).all()
            dt = nn.functional.softplus(module.dt_bias)
            assert (dt > 0.00099).all()
            assert (dt < 0.101).all()
        if isinstance(module, Mamba2):
            assert (module.D == 1).all()
            bound = 1 / math.sqrt(module.inner_size) / math.sqrt(model.config.num_hidden_layers)
            assert 0.98 * bound < module.out_proj.weight.abs().max() <= bound
        seen.add(type(module))
    assert len(seen) > 5


def check_normal(weight):
    tolerance = 4 * 0.02 / math.sqrt(2 * weight.numel())  # four standard errors
    assert abs(weight.std() - 0.02) < tolerance
    assert abs(weight.mean()) < 4 * 0.02 / math.sqrt(weight.numel())
    assert weight.abs().max() > 0.03 or weight.numel() < 100  # not uniform


def test_gates_are_drawn_over_their_whole_range():
    torch.manual_seed(0)
    layer = LinearAttention(8, num_heads=4000, head_dim=1, conv_size=0, rule="gated_efla")
    for draw in (layer, None):
        values = layer.initial_values() if draw is None else {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
        rate = values["A_log"].exp()
        assert abs(rate.mean() - 8) < 0.4  # uniform on (0, 16)
        assert abs(rate.std() - 16 / math.sqrt(12)) < 0.2
        log_dt = nn.functional.softplus(values["dt_bias"]).log()
        assert abs(log_dt.mean() - (math.log(0.001) + math.log(0.1)) / 2) < 0.1
        assert abs(log_dt.std() - math.log(100) / math.sqrt(12)) < 0.05


@pytest.mark.parametrize("arm", presets.arms())
def test_the_first_loss_is_that_of_guessing(arm):
    model = build(arm)
    tokens = torch.randint(1, 256, (4, 64))
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    assert abs(loss / math.log(256) - 1) < 0.02


@pytest.mark.parametrize("arm", presets.arms())
def test_what_matrices_are_decayed_by_shape_alone(arm):
    # Gains, biases, A_log, dt_bias and D have one dimension, and nothing else has: the rule for weight decay.
    names = [name for name, p in build(arm).named_parameters() if p.dim() == 1]
    one_dimensional = {"norm" if "norm" in name else name.rsplit(".", 1)[1] for name in names}
    assert one_dimensional <= {"norm", "bias", "A_log", "dt_bias", "D"}
