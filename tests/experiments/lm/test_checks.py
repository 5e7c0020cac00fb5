"""Checks of the arms of the language-model comparison, on every arm at its quick size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from efla import EflaForCausalLM, presets
from efla.experiments.lm.config import ARM_ORDER, RECURRENT
from efla.train.optimizer import WarmupCosine, build_optimizer
from efla.train.step import train_step

LN2 = math.log(2)
every_arm = pytest.mark.parametrize("arm", ARM_ORDER)


def model_of(arm: str, *, double: bool = False, **overrides: Any) -> Any:
    torch.manual_seed(0)
    model = EflaForCausalLM(presets.arm(arm, "quick", **overrides)).eval()
    return model.double() if double else model


def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=rows, use_cache=False).logits  # type: ignore[no-any-return]


def text(length: int = 100, rows: int = 2) -> torch.Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("arm", RECURRENT)
def test_recurrent_chunked_and_native_scans_give_the_same_logits(arm: str) -> None:
    rows = text()
    exact = logits(model_of(arm, double=True, backend="reference"), rows)
    for backend in ("chunked", "native"):
        found = logits(model_of(arm, double=True, backend=backend), rows)
        assert float((found - exact).abs().max()) < 1e-10, backend
    for backend in ("reference", "chunked", "native"):
        found = logits(model_of(arm, backend=backend), rows)
        assert float((found.double() - exact).abs().max()) < 1e-4, backend


def test_exact_flow_with_small_steps_is_the_delta_rule_with_raw_keys() -> None:
    def pair(scale: float) -> list[torch.Tensor]:
        found = []
        for arm in ("exact-flow", "delta-raw"):
            # A tiny eps, so that the output norm passes on what little the memory holds.
            model = model_of(arm, double=True, norm_eps=1e-30)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "k_conv" in name:
                        parameter.mul_(scale)
            found.append(logits(model, text()))
        return found

    small, large = pair(1e-4), pair(10.0)
    assert relative(*small) < 1e-5
    assert relative(*large) > 1e-3  # the rules do differ where steps are large


@pytest.mark.parametrize(("gated", "ungated"), [("gated-delta", "delta-l2"), ("gated-exact-flow", "exact-flow")])
def test_a_gate_held_at_one_leaves_the_ungated_rule_with_the_same_output_gate(gated: str, ungated: str) -> None:
    with_gate = model_of(gated, double=True)
    before = logits(with_gate, text())
    with torch.no_grad():
        for name, parameter in with_gate.named_parameters():
            if name.endswith("a_proj.weight"):
                parameter.zero_()
            elif name.endswith("dt_bias"):
                parameter.fill_(-1e4)  # softplus is 0: the log of the gate too
    size = with_gate.config.intermediate_size
    without = model_of(ungated, double=True, output_gate=True, intermediate_size=size)
    state = {
        name: value
        for name, value in with_gate.state_dict().items()
        if not any(part in name for part in ("a_proj", "dt_bias", "A_log"))
    }
    without.load_state_dict(state)
    assert relative(logits(with_gate, text()), logits(without, text())) < 1e-12
    assert relative(before, logits(without, text())) > 1e-6


@every_arm
def test_an_arm_overfits_one_row_of_256_bytes(arm: str) -> None:
    """Below 0.1 bits per byte within 150 steps at the quick recipe's rate."""
    model = model_of(arm)
    optimizer = build_optimizer(model)
    schedule = WarmupCosine.tenth(150, 2e-3)
    row = text(256, 1)
    bits = math.inf
    for step in range(schedule.steps):
        bits = train_step(model, optimizer, [row], rate=schedule.rate(step)).loss / LN2
        if bits < 0.1:
            break
    assert bits < 0.1


@every_arm
def test_a_byte_changes_no_logit_before_it(arm: str) -> None:
    model, rows = model_of(arm), text()
    before = logits(model, rows)
    for position in (1, 40, 99):
        changed = rows.clone()
        changed[:, position] = (changed[:, position] + 7) % 255 + 1
        after = logits(model, changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


@every_arm
@pytest.mark.parametrize("profile", ["quick", "full"])
def test_the_initial_loss_is_that_of_guessing(arm: str, profile: str) -> None:
    torch.manual_seed(42)
    model = EflaForCausalLM(presets.arm(arm, profile))
    rows = text(128, 4)
    with torch.no_grad():
        loss = float(model(input_ids=rows, labels=rows).loss)
    assert loss == pytest.approx(math.log(256), rel=0.02)
