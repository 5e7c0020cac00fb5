"""Recipes resolve to the numbers of the specification, and the command line shows and changes them."""

from __future__ import annotations

import json
import math
import re

import pytest

from efla import cli, presets
from efla.models.accounting import count_parameters
from efla.train import recipes
from efla.train.config import TrainConfig, parse_fields
from efla.train.estimate import Machines, estimate

PARAMETERS = {
    "efla-340m": 374_362_112,
    "deltanet-340m": 374_362_112,
    "transformer-340m": 373_867_520,
    "mamba2-340m": 382_387_712,
    "gated-efla-340m": 379_888_124,
    "gated-deltanet-340m": 379_888_124,
    "efla-1.3b": 1_365_677_056,
    "deltanet-1.3b": 1_365_677_056,
    "transformer-1.3b": 1_364_297_728,
    "mamba2-1.3b": 1_371_839_488,
}
FULL = {"delta-l2": 1_881_280, "exact-flow": 1_881_280, "gated-delta": 1_883_608, "gated-exact-flow": 1_883_608,
        "mamba2": 1_848_958, "attention": 1_869_504, "delta-raw": 1_881_280, "exact-flow-l2": 1_881_280}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "steps", "per_step", "tokens"),
    [("340m", 7_629, 1_048_576, 7_999_586_304), ("1.3b", 23_842, 2_097_152, 50_000_297_984)],
)
@pytest.mark.parametrize("model", ["efla", "deltanet", "gated-efla", "gated-deltanet", "mamba2", "transformer"])
def test_the_papers_recipes(model, size, steps, per_step, tokens):
    config = recipes.get(f"{model}-{size}-paper")
    assert (config.optimizer.steps, config.tokens_per_step, config.total_tokens) == (steps, per_step, tokens)
    assert (config.data.length, config.data.rows * 2048) == (2048, per_step)
    schedule = config.schedule()
    assert schedule.rate(0) == pytest.approx(3e-5 + 2.7e-4 / 1024, rel=1e-12)
    assert schedule.rate(1023) == schedule.rate(1024) == pytest.approx(3e-4, rel=1e-12)
    last = 3e-5 + 1.35e-4 * (1 + math.cos(math.pi * (steps - 1025) / (steps - 1024)))
    assert schedule.rate(steps - 1) == pytest.approx(last, rel=1e-12)
    o = config.optimizer
    assert (o.betas, o.eps, o.weight_decay, o.clip, o.seed) == ((0.9, 0.95), 1e-15, 0.1, 1.0, 42)
    assert (o.precision, o.nonfinite, config.data.tokenizer, config.data.documents) == (
        "bfloat16",
        "skip",
        "mistral",
        "carry",
    )
    assert config.model_config().conv_init == "normal"
    if f"{model}-{size}" in PARAMETERS:
        assert count_parameters(config.model_config()) == PARAMETERS[f"{model}-{size}"]


@pytest.mark.parametrize("arm", presets.arms())
def test_the_cpu_protocols_recipes(arm):
    quick, full = recipes.get(f"{arm}-quick"), recipes.get(f"{arm}-full")
    assert (quick.total_tokens, quick.data.data, quick.data.length) == (409_600, "shakespeare", 256)
    assert (full.total_tokens, full.data.data, full.data.length) == (8_192_000, "novels", 512)
    for config, steps in ((quick, 200), (full, 2000)):
        schedule = config.schedule()
        assert (schedule.steps, schedule.warmup_steps) == (steps, steps // 10)
        assert (schedule.start, schedule.peak, schedule.final) == (2e-4, 2e-3, 2e-4)
        assert (config.optimizer.eps, config.data.rows, config.data.order) == (1e-8, 8, "uniform")
        assert config.model_config().conv_init == "default"
    assert (quick.watch.validate_every, quick.watch.validation_tokens) == (50, 32_768)
    assert (full.watch.validate_every, full.watch.validation_tokens) == (250, 131_072)
    assert count_parameters(full.model_config()) == FULL[arm]


def test_every_recipe_can_be_estimated_without_being_run():
    for name in recipes.names():
        facts = estimate(recipes.get(name), Machines("a100", 8, 0.4))
        assert facts["estimated_hours"] >= 0
        assert facts["tokens"] == facts["steps"] * facts["tokens_per_step"]


def test_the_estimate_follows_from_its_parts():
    config = recipes.get("efla-340m-paper")
    facts = estimate(config, Machines("a100", 8, 0.5))
    assert facts["training_flops_per_token"] == 3 * 701_956_096
    seconds = 3 * 701_956_096 * 7_999_586_304 / (312e12 * 0.5 * 8)
    assert facts["estimated_hours"] == pytest.approx(seconds / 3600, abs=1e-3)
    assert (facts["rows_of_a_forward_pass"], facts["micro_batches_a_step"]) == (16, 4)
    assert facts["state_bytes_per_sequence"] == 13_467_648


def test_an_estimate_of_memory_is_about_what_a_step_takes():
    """Bytes that autograd keeps for the backward pass of the full CPU model, counted, against the formula."""
    import torch

    from efla import EflaForCausalLM
    from efla.train.estimate import activation_bytes
    from efla.train.step import row_loss

    config = recipes.get("exact-flow-full")
    model = EflaForCausalLM(config.model_config())
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        row_loss(model, torch.randint(1, 256, (2, 512)), 1022)
    assert 0.4 < activation_bytes(config, 1024) / sum(kept.values()) < 2.5


def test_a_dry_run_prints_everything_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "train",
        "--recipe",
        "efla-1.3b-paper",
        "--dry-run",
        "--estimate-device",
        "a100",
        "--estimate-count",
        "8",
    ]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for fact in ("1,365,677,056", "50,000,297,984", "23,842", "0: 3.02637e-05, 1023: 0.0003, 1024: 0.0003", "8 x a100"):
        assert fact in shown
    assert len(shown.splitlines()) <= 25 and "betas" not in shown
    assert "7.91 GFLOP\n" in shown and re.search(r"^fits +yes$", shown, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
    assert cli.main([*arguments, "--verbose"]) == 0
    assert "betas" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["parameters"] == 1_365_677_056


def test_a_run_that_does_not_fit_a_device_is_called_that():
    config = recipes.get("efla-1.3b-paper")
    facts = estimate(config, Machines("4090", 8))
    assert (facts["memory_of_a_device_gb"], facts["fits"]) == (24.0, False)
    assert facts["estimated_memory_gb_per_device"] > 24
    assert estimate(config, Machines("a100", 8))["fits"]


def test_options_replace_the_recipes_values(capsys):
    arguments = "train --recipe exact-flow-full --dry-run --json --steps 50 --rows 16 --set hidden_size=96 --keep 5"
    assert cli.main(arguments.split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["optimizer"]["steps"] == 50
    assert record["config"]["data"] == {**record["config"]["data"], "rows": 16, "length": 512, "data": "novels"}
    assert record["config"]["model"] == {"model": "exact-flow:full", "set": ["hidden_size=96"]}
    assert record["config"]["watch"]["keep"] == 5
    assert record["estimate"]["rate_at_step"]["5"] == 2e-3  # a tenth of 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe efla-340-paper", "unknown recipe 'efla-340-paper'; did you mean 'efla-340m-paper'"),
        ("--recipe", "--recipe needs a name"),
        ("--model elfa-tiny", "unknown model 'elfa-tiny'; did you mean"),
        ("--set hidden_size", "--set expects name=value, got 'hidden_size'"),
        ("--set hiden_size=3", "unknown key 'hiden_size' in EflaConfig; did you mean 'hidden_size'?"),
        ("--recipe efla-340m-paper --steps 20", "use --stop-after"),
        ("--rows 6 --micro-rows 4", "--micro-rows 4 does not divide the 6 rows per step of a rank"),
        ("--peak-rate 1e-5", "the peak the largest"),
        ("--sequence-parallel 3", "rows of 256 tokens do not divide over 3 ranks"),
        ("--sequence-parallel 2 --documents reset", "cannot reset the memory inside them"),
        ("--estimate-device v100", "unknown device 'v100'; did you mean"),
        ("--length 1", "length must be at least 2, got 1"),
        ("--keep 0", "keep must be at least 1, got 0"),
        ("--save-every -1", "save_every must be at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(arguments, message, capsys):
    assert cli.main(["train", "--dry-run", *arguments.split()]) == 1
    assert message in capsys.readouterr().err


def test_recipes_are_listed(capsys):
    assert cli.main(["train", "--list-recipes"]) == 0
    assert capsys.readouterr().out.split() == recipes.names()
    assert {"tiny", "efla-340m-paper", "efla-1.3b-paper", "efla-full"} <= set(recipes.names())


def test_fields_are_json_or_text():
    assert parse_fields(("a=1", "b=true", 'c=["x"]', "d=normal", "e=1e-5", "f=x=y")) == {
        "a": 1,
        "b": True,
        "c": ["x"],
        "d": "normal",
        "e": 1e-5,
        "f": "x=y",
    }


def test_what_may_change_is_not_part_of_a_runs_identity():
    assert "save_every" not in TrainConfig().resume_key()
    assert "strategy" not in TrainConfig().resume_key()
    assert "data_root" not in TrainConfig().resume_key()
    assert {"model", "set", "data", "length", "rows", "steps", "seed", "precision"} <= set(TrainConfig().resume_key())
