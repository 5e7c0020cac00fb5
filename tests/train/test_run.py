"""A run from the first step to the model it leaves behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from efla import EflaForCausalLM, cli, presets
from efla.data import corpora
from efla.data.sampling import TokenStream
from efla.train import loop
from efla.train.output import METRICS, MetricsLog, read_metrics, si
from efla.train.section import curve, save_curve
from efla.train.step import row_loss, validate
from tests.data.test_prepare import has
from tests.train.small import SIZES, losses, small


def test_the_default_command_trains_saves_and_can_be_continued_from(tmp_path, capsys, monkeypatch):
    """What a newcomer does, with fewer steps: train, then generate from the result."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--steps", "30", "--validate-every", "15"]) == 0
    shown = capsys.readouterr().out
    assert "efla-tiny: 471,296 parameters on python-docs" in shown
    lines = shown.splitlines()
    assert lines[-2] == 'next:  efla generate runs/train-tiny --prompt "The "'
    headings = next(i for i, line in enumerate(lines) if line.split()[:3] == ["step", "training", "loss"])
    assert [line.split()[0] for line in lines[headings + 1 : headings + 3]] == ["15", "30"]
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    found = losses(Path("runs/train-tiny"))
    assert abs(found[0] / math.log(256) - 1) < 0.02
    assert found[-1] < 3.3
    assert cli.main(["generate", "runs/train-tiny/model", "--prompt", "The ", "--max-new-tokens", "10"]) == 0
    assert capsys.readouterr().out.startswith("The ")
    record = json.loads(Path("runs/train-tiny/config.json").read_text())
    assert record["config"]["optimizer"]["steps"] == 30
    assert {"versions", "commit", "machine", "model"} <= set(record)


def test_metrics_say_what_happened(tmp_path):
    loop.run(small(), tmp_path)
    rows = read_metrics(tmp_path)
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["rate"] for row in steps] == [small().schedule().rate(step) for step in range(12)]
    assert all(row["tokens"] == 128 * row["step"] and row["tokens_per_second"] > 0 for row in steps)
    assert [row["step"] for row in rows if row["event"] == "validation"] == [4, 8, 12]
    assert [row["step"] for row in rows if row["event"] == "sample"] == [12]
    assert (rows[0]["event"], rows[-1]) == ("start", {"event": "end", "step": 12, "why": "finished"})


def test_resuming_drops_later_rows_and_half_a_line(tmp_path):
    lines = [f'{{"event":"step","step":{n}}}\n' for n in range(1, 6)]
    (tmp_path / METRICS).write_text("".join(lines) + '{"event":"st')
    assert len(read_metrics(tmp_path)) == 5
    MetricsLog(tmp_path, 3).close()
    assert (tmp_path / METRICS).read_text() == "".join(lines[:3])


def test_the_validation_loss_is_the_mean_over_all_predicted_tokens():
    torch.manual_seed(0)
    model = EflaForCausalLM(presets.arm("exact-flow", hidden_size=32, num_heads=2, intermediate_size=32))
    stream = corpora.load("python-docs").stream("validation")
    text = stream.read(0, 100)
    expected = []
    with torch.no_grad():
        for start in range(0, 100, 30):
            row = torch.from_numpy(text[start : start + 30])[None]
            log_p = model.eval()(row).logits[0].double().log_softmax(-1)
            expected += (-log_p[:-1].gather(1, row[0, 1:, None])).flatten().tolist()
    found = validate(model, stream, length=30, rows=2, limit=100)
    assert found.tokens == len(expected) == 96
    assert found.loss == pytest.approx(sum(expected) / 96, rel=1e-5)
    assert found.bits_per_token == pytest.approx(found.loss / math.log(2))
    assert model.training is False
    with pytest.raises(ValueError, match="has 1 tokens, too few"):
        validate(model, TokenStream(np.zeros(1, np.uint8)), length=30)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_loss_that_is_not_finite_is_counted_or_stops_the_run(policy, tmp_path, monkeypatch, capsys):
    true_loss = row_loss

    def sometimes_infinite(model, rows, labels, **options):
        loss = true_loss(model, rows, labels, **options)
        return loss * float("inf") if model.training and torch.equal(rows, bad) else loss

    config = small(nonfinite=policy)
    bad = loop.RowSampler(
        corpora.load("python-docs").stream(), config.data.length, config.data.rows, config.optimizer.seed
    ).batch(5)
    monkeypatch.setattr("efla.train.step.row_loss", sometimes_infinite)
    console = Console(force_terminal=False)
    if policy == "stop":
        with pytest.raises(
            RuntimeError, match=r"step 6: loss inf, .*rows 20 to 23.*last good checkpoint is .*step-00000003"
        ):
            loop.run(config, tmp_path, console=console)
        assert read_metrics(tmp_path)[-1] == {"event": "end", "step": 6, "why": "not finite"}
        return
    outcome = loop.run(config, tmp_path, console=console)
    assert (outcome.finished, outcome.skipped) == (True, 1)
    assert [row["step"] for row in read_metrics(tmp_path) if row.get("applied") is False] == [6]
    assert "the step was skipped (1 so far)" in capsys.readouterr().out
    assert math.isinf(float(losses(tmp_path)[5]))
    monkeypatch.undo()
    assert json.loads((tmp_path / "checkpoints/step-00000012/state.json").read_text())["skipped"] == 1


def test_too_many_skipped_steps_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("efla.train.step.row_loss", lambda *a, **k: row_loss(*a, **k) * float("nan"))
    with pytest.raises(RuntimeError, match=r"3 such steps \(--max-skipped 2\)"):
        loop.run(small(max_skipped=2, validate_every=0), tmp_path)


def test_skipped_steps_are_counted_across_a_resume(tmp_path, monkeypatch):
    """One bad step before the stop, one after: with --max-skipped 1 the second one ends the run."""
    true_step, bad = loop.train_step, {2, 6}

    def sometimes_skipped(*args, **options):
        result = true_step(*args, **options)
        return dataclasses.replace(result, applied=next(numbers) not in bad)

    monkeypatch.setattr(loop, "train_step", sometimes_skipped)
    numbers = itertools.count(1)
    outcome = loop.run(small(max_skipped=1, stop_after=4), tmp_path)
    assert (outcome.steps, outcome.skipped) == (4, 1)
    numbers = itertools.count(5)
    with pytest.raises(RuntimeError, match=r"step 6: .*2 such steps \(--max-skipped 1\)"):
        loop.run(small(max_skipped=1), tmp_path)
    bad.remove(6)
    numbers = itertools.count(5)
    outcome = loop.run(small(max_skipped=1), tmp_path)
    assert (outcome.finished, outcome.skipped) == (True, 1)


def test_bfloat16_and_gradient_checkpointing_train_alike(tmp_path):
    loop.run(small(), tmp_path / "plain")
    loop.run(small(gradient_checkpointing=True), tmp_path / "checkpointed")
    assert losses(tmp_path / "checkpointed") == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)
    loop.run(small(precision="bfloat16"), tmp_path / "bfloat16")
    assert losses(tmp_path / "bfloat16") == pytest.approx(losses(tmp_path / "plain"), abs=0.03)
    assert losses(tmp_path / "bfloat16") != losses(tmp_path / "plain")


@pytest.mark.slow
def test_compiled_blocks_train_alike(tmp_path):
    loop.run(small(), tmp_path / "plain")
    loop.run(small(compile=True), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)


def test_weights_stay_in_float32_under_bfloat16(tmp_path):
    loop.run(small(precision="bfloat16", model="gated-efla-tiny"), tmp_path)
    model = EflaForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_text_of_ones_own_is_prepared_once_and_trained_on(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("a text of my own. " * 300)
    config = small(data=str(tmp_path / "mine.txt"))
    loop.run(config, tmp_path / "run", console=Console(force_terminal=False))
    assert "preparing" in capsys.readouterr().out
    assert (tmp_path / "run" / "data" / "index.json").is_file()
    assert [row for row in read_metrics(tmp_path / "run") if row["event"] == "validation"][-1]["tokens"] > 10


def test_text_under_another_key_is_named_and_then_trained_on(tmp_path, capsys):
    """The error names an option that ``efla train`` has."""
    (tmp_path / "mine.jsonl").write_text('{"body": "a text of my own. "}\n' * 300)
    command = ["train", "--data", str(tmp_path / "mine.jsonl"), "--output", str(tmp_path / "run"), "--quiet"]
    command += ["--steps", "2", "--rows", "1", "--length", "16", "--sample-tokens", "0", "--set", *SIZES]
    assert cli.main(command) == 1
    assert "no text under 'text' (found: body); name it with --column" in capsys.readouterr().err
    assert cli.main([*command, "--column", "body"]) == 0
    assert capsys.readouterr().out == ""
    assert len(losses(tmp_path / "run")) == 2


def test_a_model_folder_is_trained_further(tmp_path):
    loop.run(small(), tmp_path / "first")
    model = str(tmp_path / "first" / "model")
    loop.run(small(model=model, set=(), start_rate=1e-6, peak_rate=1e-6, final_rate=1e-6), tmp_path / "second")
    rows = loop.RowSampler(corpora.load("python-docs").stream(), 32, 4, 42).batch(0)
    expected = row_loss(EflaForCausalLM.from_pretrained(model), rows, rows.numel() - 4)
    assert losses(tmp_path / "second")[0] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] - 0.3


def test_a_vocabulary_that_is_too_small_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"vocabulary of 256 \(bytes\), the model efla-tiny only 100; use --set vocab_size=256"
    ):
        loop.run(small(set=(*small().model.set, "vocab_size=100")), tmp_path)
    with pytest.raises(FileNotFoundError, match="is neither a corpus"):
        loop.run(small(data="no-such-thing"), tmp_path / "b")


@pytest.mark.skipif(not has("tensorboard"), reason="tensorboard is not installed (extra train)")
def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop.run(small(tensorboard=True), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("step/loss")] == pytest.approx(losses(tmp_path), rel=1e-6)


def test_weights_and_biases_gets_the_same_numbers(tmp_path, monkeypatch):
    """With a module in the place of wandb: one run per start, in the output folder, that resumes."""
    started, logged, finished = [], [], []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(1))
    fake = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loop.run(small(wandb=True), tmp_path)
    (options,) = started
    assert (options["project"], options["dir"], options["resume"]) == ("efla", str(tmp_path), "auto")
    assert options["config"]["config"]["watch"]["wandb"] is True
    assert [values["step/loss"] for _, values in logged if "step/loss" in values] == losses(tmp_path)
    assert [step for step, values in logged if "validation/bits_per_token" in values] == [4, 8, 12]
    assert [step for step, values in logged if "sample" in values] == [12]
    assert finished == [1]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match="--wandb needs the package wandb: pip install wandb"):
        loop.run(small(wandb=True), tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "0.5 B"), (999, "999 B"), (999.6, "1 kB"), (12_345, "12.3 kB"), (2.1e9, "2.1 GB"), (4.2e19, "42 EB")],
)
def test_large_numbers_have_prefixes(value, shown):
    assert si(value, "B") == shown


@pytest.mark.parametrize("arm", ["gated-exact-flow", "mamba2", "attention"])
def test_other_arms_learn_too(arm, tmp_path):
    sizes = (*small().model.set, "num_attention_heads=2") if arm == "attention" else small().model.set
    loop.run(small(model=f"{arm}:quick", set=sizes, steps=20, peak_rate=1e-2, start_rate=1e-3), tmp_path)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 1


def test_a_curve_is_drawn_from_the_metrics_alone(tmp_path, monkeypatch):
    rows = [{"event": "step", "step": n, "tokens": 10 * n, "loss": 5 / n} for n in range(1, 1001)]
    rows += [{"event": "validation", "step": n, "bits_per_token": 5 / n} for n in (10, 1000)]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (chart,) = curve(tmp_path).charts
    training, validation = chart.series
    assert (training.label, len(training.points)) == ("training, mean of 2 steps", 500)
    assert (training.points[0].x, training.points[0].y) == (20, pytest.approx((5 + 2.5) / 2 / math.log(2)))
    assert [(p.x, p.y) for p in validation.points] == [(100, 0.5), (10_000, 0.005)]
    with monkeypatch.context() as patched:
        patched.setattr("efla.runs.vega.find_spec", lambda name: None)
        save_curve(tmp_path)
    assert not (tmp_path / "curve.svg").exists(), "without the packages there is none"
    pytest.importorskip("altair")
    save_curve(tmp_path)
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    (tmp_path / METRICS).write_text("")
    with pytest.raises(ValueError, match="no finished step to draw"):
        curve(tmp_path)
