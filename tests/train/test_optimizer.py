"""Rates in closed form, and which parameters have weight decay."""

from __future__ import annotations

import math

import pytest
import torch

from efla import EflaForCausalLM, presets
from efla.train.optimizer import WarmupCosine, build_optimizer, parameter_groups

PAPER = {"peak": 3e-4, "start": 3e-5, "final": 3e-5, "warmup_steps": 1024}


@pytest.mark.parametrize("steps", [7_629, 23_842])
def test_the_papers_rates_at_the_four_corners(steps):
    schedule = WarmupCosine(steps=steps, **PAPER)
    last = 3e-5 + 0.5 * 2.7e-4 * (1 + math.cos(math.pi * (steps - 1 - 1024) / (steps - 1024)))
    assert schedule.rate(0) == pytest.approx(3e-5 + 2.7e-4 / 1024, rel=1e-12)
    assert schedule.rate(1023) == pytest.approx(3e-4, rel=1e-12)
    assert schedule.rate(1024) == pytest.approx(3e-4, rel=1e-12)
    assert schedule.rate(steps - 1) == pytest.approx(last, rel=1e-12)
    assert 3e-5 < last < 3.001e-5


def test_the_cpu_protocols_rates():
    schedule = WarmupCosine.tenth(200, 2e-3)
    assert schedule.warmup_steps == 20
    assert schedule.rate(0) == pytest.approx(2e-4 + 1.8e-3 / 20)
    assert schedule.rate(19) == schedule.rate(20) == pytest.approx(2e-3)
    rates = [schedule.rate(step) for step in range(200)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="between 0 and steps"):
        WarmupCosine(steps=10, **PAPER)
    with pytest.raises(ValueError, match="peak the largest"):
        WarmupCosine(steps=10, warmup_steps=2, peak=1e-3, start=2e-3, final=0)
    with pytest.raises(ValueError, match="outside the schedule"):
        WarmupCosine.tenth(10, 1e-3).rate(10)


@pytest.mark.parametrize("arm", ["gated-exact-flow", "mamba2", "attention"])
def test_one_dimensional_parameters_are_not_decayed(arm):
    model = EflaForCausalLM(presets.arm(arm))
    with_decay, without_decay = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    exempt = {names[id(p)].rsplit(".", 1)[-1] for p in without_decay["params"]}
    assert exempt <= {"weight", "bias", "A_log", "dt_bias", "D"}
    assert all("norm" in names[id(p)] for p in without_decay["params"] if names[id(p)].endswith("weight"))
    assert {"gated-exact-flow": {"A_log", "dt_bias"}, "mamba2": {"A_log", "dt_bias", "D", "bias"}, "attention": set()}[
        arm
    ] <= exempt
    assert all("norm" not in names[id(p)] for p in with_decay["params"])
    assert (with_decay["weight_decay"], without_decay["weight_decay"]) == (0.1, 0.0)
    assert len(with_decay["params"]) + len(without_decay["params"]) == len(list(model.parameters()))


def test_a_state_present_from_the_start_changes_no_update():
    """The same two steps as torch's AdamW that makes its state itself."""
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        groups = parameter_groups(model, 0.1)
        optimizer = (
            build_optimizer(model, eps=1e-8)
            if ours
            else torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
        )
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 5), 0.3 + step)).square().sum().backward()
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
