"""Metrics by hand, the protocol, and cells that come out the same however they are run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from efla import cli
from efla.experiments.experiment import Group, shuffled_batches
from efla.experiments.mad.config import MadConfig, MadOptions, profile
from efla.experiments.mad.model import TaskScore, build, evaluate, macro_recall
from efla.experiments.mad.run import Mad, MadTraining, rate_at, summary, train
from efla.experiments.mad.tasks import Setting, generate
from efla.experiments.runner import run
from efla.runs.rows import read_rows
from tests.experiments.mad.files import write_published
from tests.experiments.rows import without_volatile


def test_reference_accuracy_equals_an_example_by_hand() -> None:
    # class 0: wanted 3, hit 2 -> 2/3.  class 1: wanted 2, hit 1 -> 1/2.  class 2: wanted 1, hit 0 -> 0.
    # class 3: predicted once, never wanted -> 0, and counted.  class 4: neither -> left out.
    wanted = torch.tensor([0, 0, 0, 1, 1, 2])
    predicted = torch.tensor([0, 0, 1, 1, 3, 0])
    assert macro_recall(predicted, wanted, 5) == pytest.approx((2 / 3 + 1 / 2 + 0 + 0) / 4)


class Table(nn.Module):
    """Logits by token, so that every prediction is known."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        flat = self.logits[tokens.flatten()]
        return flat if where is None else flat[where]


def test_evaluation_averages_batches_by_their_size_and_tokens_by_their_number() -> None:
    # Token t predicts class t % 3 with probability 0.8, the others with 0.1 each.
    probabilities = torch.full((6, 3), 0.1)
    probabilities[torch.arange(6), torch.arange(6) % 3] = 0.8
    model = Table(probabilities.log())
    inputs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    targets = torch.tensor([[0, 1], [2, -100], [0, 2]])
    score = evaluate(model, inputs, targets, batch=2)
    # batch 1: wanted 0 1 2, all hit: 1.  batch 2: token 4 predicts 1 (wanted 0), token 5 predicts 2 (wanted 2):
    # recalls 0, 0 (predicted, never wanted), 1.
    assert score.reference_accuracy == pytest.approx((2 * 1 + 1 * (1 / 3)) / 3)
    assert score.token_accuracy == pytest.approx(4 / 5)
    nll = [-math.log(0.8), -(math.log(0.1) + math.log(0.8)) / 2]
    assert score.loss == pytest.approx((3 * nll[0] + 2 * nll[1]) / 5, rel=1e-6)
    assert score.perplexity == pytest.approx((2 * math.exp(nll[0]) + math.exp(nll[1])) / 3, rel=1e-6)


def test_a_model_that_is_not_finite_scores_nothing() -> None:
    score = evaluate(Table(torch.full((4, 3), math.nan)), torch.tensor([[0, 1]]), torch.tensor([[0, 1]]))
    assert all(math.isnan(value) for value in dataclasses.asdict(score).values())
    result = MadTraining(scores=[(10, score)])
    assert result.best is None
    row = summary(result)
    assert math.isnan(row["reference_accuracy"]) and math.isnan(row["reference_accuracy_last"])


def test_the_checkpoint_scored_has_the_lowest_perplexity() -> None:
    result = MadTraining(
        steps=300,
        scores=[
            (100, TaskScore(0.5, 0.5, 1.0, 2.9)),
            (200, TaskScore(0.6, 0.6, 0.9, 2.5)),
            (300, TaskScore(0.7, 0.7, 1.2, 3.5)),
        ],
    )
    row = summary(result)
    assert (row["best_step"], row["reference_accuracy"], row["reference_accuracy_last"]) == (200, 0.6, 0.7)
    result.diverged_at = 301
    row = summary(result)
    assert row["reference_accuracy"] == 0.6 and math.isnan(row["reference_accuracy_last"])


def test_batches_cover_each_epoch_once_in_an_order_of_its_own_and_keep_the_rest() -> None:
    stream = shuffled_batches(3, 10, 4)
    epochs = [[next(stream) for _ in range(3)] for _ in range(2)]
    for number, epoch in enumerate(epochs):
        assert [len(indices) for _, indices in epoch] == [4, 4, 2]
        assert all(of == number for of, _ in epoch)
        assert sorted(torch.cat([indices for _, indices in epoch]).tolist()) == list(range(10))
    assert epochs[0][0][1].tolist() != epochs[1][0][1].tolist()


def test_the_schedule_is_constant_unless_asked() -> None:
    assert rate_at(1e-3, 0.7, "constant") == 1e-3
    assert rate_at(1e-3, 0.0, "cosine") == pytest.approx(1e-3)
    assert rate_at(1e-3, 1.0, "cosine") == pytest.approx(1e-6)


def _tiny(**changes: object) -> MadConfig:
    config = replace(profile("quick"), width=16, heads=1, steps=6, memorization_steps=6, evaluate_every=3)
    return replace(config, **changes)  # type: ignore[arg-type]


def _quiet(fraction: float, **values: float) -> None:
    return None


def _data(task: str, **changes: object) -> object:
    setting = replace(profile("quick").setting(task, "short"), num_train_examples=64, num_test_examples=40)
    return generate(replace(setting, **changes))  # type: ignore[arg-type]


def test_training_learns_a_small_memorisation_task_and_stops_early() -> None:
    setting = Setting(task="memorization", vocab_size=12, seq_len=16, num_train_examples=64, num_test_examples=64)
    config = replace(profile("quick"), memorization_steps=400, evaluate_every=40)
    model = build(config, setting, "exact-flow", 0)
    result = train(model, generate(setting), config, rate=3e-3, decay=0.0, seed=0, report=_quiet)
    assert result.scores[-1][1].reference_accuracy > 0.999
    assert result.stopped_early and result.steps == result.scores[-1][0] < 400
    assert result.losses[-1][1] < result.losses[0][1]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_recorded() -> None:
    config = _tiny(steps=50)
    data = _data("in-context-recall")
    model = build(config, data.setting, "exact-flow", 0)  # type: ignore[attr-defined]
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(math.nan)
    result = train(model, data, config, rate=1e-3, decay=0.0, seed=0, report=_quiet)  # type: ignore[arg-type]
    assert result.diverged_at == 1 and result.steps == 0
    assert math.isnan(summary(result)["reference_accuracy"])


def test_weight_decay_acts_on_all_parameters() -> None:
    config = _tiny(steps=1, evaluate_every=1)
    data = _data("compression")
    norms = []
    for decay in (0.0, 0.5):
        model = build(config, data.setting, "exact-flow", 0)  # type: ignore[attr-defined]
        train(model, data, config, rate=1e-2, decay=decay, seed=0, report=_quiet)  # type: ignore[arg-type]
        norms.append({name: p.detach().clone() for name, p in model.named_parameters()})
    start = dict(build(config, data.setting, "exact-flow", 0).named_parameters())  # type: ignore[attr-defined]
    for name, plain in norms[0].items():
        torch.testing.assert_close(norms[1][name], plain - 0.005 * start[name].detach(), rtol=1e-4, atol=1e-6)


def _grid(config: MadConfig, tasks: tuple[str, ...], arms: tuple[str, ...]) -> MadConfig:
    group = Group(arms, (1e-3,), (12345,), settings=tuple(f"{task}/short" for task in tasks))
    return replace(config, groups=(group,))


def _stable_rows(folder: Path) -> list[dict[str, object]]:
    rows = (
        {key: value for key, value in without_volatile(row).items() if key != "commit"} for row in read_rows(folder)
    )
    return sorted(rows, key=lambda row: str(row["cell"]))


def test_a_cell_does_not_depend_on_the_number_of_workers_or_on_what_ran_before(tmp_path: Path) -> None:
    config = _grid(_tiny(), ("memorization", "selective-copying"), ("delta-l2", "exact-flow"))
    quiet = Console(quiet=True)
    run(Mad(config), tmp_path / "inline", executor="inline", console=quiet)
    run(Mad(config), tmp_path / "workers", executor="process", workers=2, console=quiet)
    inline = _stable_rows(tmp_path / "inline")
    assert len(inline) == 4
    assert _stable_rows(tmp_path / "workers") == inline


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    config = _grid(_tiny(), ("memorization",), ("delta-l2", "exact-flow"))
    quiet = Console(quiet=True)
    run(Mad(config), tmp_path / "inline", executor="inline", console=quiet)
    run(Mad(config), tmp_path / "ray", executor="ray", workers=2, console=quiet)
    assert _stable_rows(tmp_path / "ray") == _stable_rows(tmp_path / "inline")


def test_a_row_says_everything_about_its_run(tmp_path: Path) -> None:
    config = _grid(_tiny(), ("fuzzy-in-context-recall",), ("exact-flow",))
    run(Mad(config), tmp_path, executor="inline", console=Console(quiet=True))
    row = read_rows(tmp_path)[-1]
    assert row["profile"] == "quick" and row["task"] == "fuzzy-in-context-recall" and row["arm"] == "exact-flow"
    assert row["parameters_of_task"]["k_motif_size"] == 3
    for key in ("heads", "width", "rate", "decay", "schedule", "seed", "parameters", "steps", "epochs", "best_step",
                "reference_accuracy", "reference_accuracy_last", "token_accuracy", "token_accuracy_last", "test_loss",
                "wall_seconds", "threads", "versions"):  # fmt: skip
        assert row[key] is not None, key
    assert row["steps"] == 6 and [point["step"] for point in row["evaluations"]] == [3, 6]
    assert row["config"]["guarantee_probe"] is False


def test_the_time_is_estimated_and_told_before_the_run(tmp_path: Path) -> None:
    config = _grid(_tiny(), ("memorization",), ("delta-l2", "exact-flow"))
    seconds = Mad(config).expected_seconds(Mad(config).cells(), 1)
    assert len(seconds) == 2 and all(value > 0 for value in seconds)
    with open(tmp_path / "log", "w") as log:
        run(Mad(config), tmp_path / "run", executor="inline", console=Console(file=log))
    first = (tmp_path / "log").read_text().splitlines()[0]
    assert "2 cells to run" in first and "about" in first


def test_options_narrow_the_grid_and_refuse_unknown_names() -> None:
    options = MadOptions(profile="full", tasks=("memorization",), arms=("mamba2",), seeds=(1, 2))
    cells = Mad(options.config()).cells()
    assert {cell.settings["setting"] for cell in cells} == {"baseline", "V1024"}
    assert {cell.settings["arm"] for cell in cells} == {"mamba2"}
    assert len(cells) == 2 * 2 * 2
    hard = MadOptions(profile="full", settings=("noise0.6",)).config()
    assert {cell.settings["task"] for cell in Mad(hard).cells()} == {"noisy-in-context-recall"}
    with pytest.raises(ValueError, match="memorization"):
        MadOptions(tasks=("memorisation",)).config()
    with pytest.raises(ValueError, match="noise"):
        MadOptions(profile="full", settings=("noise0.7",)).config()
    part = Mad(MadOptions(profile="full", arms=("delta-l2", "exact-flow")).config()).cells()
    assert len(part) == 12 * 2 * 2 + 6 * 2 * 2 * 2 + 2 * 2 * 2 * 5, "the profile's runs of this pair, all seeds"
    later = Mad(MadOptions(profile="full", seeds=(12346, 12347)).config()).cells()
    assert len(later) == 6 * 2 * 2 * 2 + 2 * 2 * 2 * 2 and {cell.settings["setting"] for cell in later} == {"baseline"}
    steps = MadOptions(steps=11).config()
    assert {steps.steps_of(steps.setting(task, "short")) for task in ("memorization", "compression")} == {11}


def test_published_files_are_trained_on_and_what_they_do_not_hold_is_refused(tmp_path: Path) -> None:
    options = MadOptions(profile="full", data=str(tmp_path), tasks=("memorization",), settings=("baseline",), steps=2)
    config = options.config()
    assert {seed for group in config.groups for seed in group.seeds} == {12345}, "the published files have one seed"
    setting = config.setting("memorization", "baseline")
    write_published(tmp_path, generate(setting))
    config = replace(config, width=16, heads=1, groups=(config.groups[0]._replace(arms=("mamba2",), rates=(1e-3,)),))
    run(Mad(config), tmp_path / "run", executor="inline", console=Console(quiet=True))
    row = read_rows(tmp_path / "run")[-1]
    assert row["data"]["source"].startswith("files of t-M_vs-256")
    assert row["heads"] == 1, "of the mixer that was run: inner width 32 in heads of 32"
    with pytest.raises(ValueError, match="short settings"):
        MadOptions(data=str(tmp_path)).config()
    with pytest.raises(ValueError, match="cannot be combined with files"):
        replace(options, guarantee_probe=True).config()


def test_with_epochs_as_the_budget_every_epoch_is_evaluated_and_the_cosine_goes_by_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _tiny(steps=None, memorization_steps=None, epochs=3, evaluate_every=None, batch=32, schedule="cosine")
    data = _data("compression")
    model = build(config, data.setting, "exact-flow", 0)  # type: ignore[attr-defined]
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def recorded(optimizer: torch.optim.AdamW) -> object:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    result = train(model, data, config, rate=1e-3, decay=0.0, seed=0, report=_quiet)  # type: ignore[arg-type]
    assert (result.steps, result.epochs) == (6, 3)  # 64 instances in batches of 32
    assert [step for step, _ in result.scores] == [2, 4, 6]
    assert rates == pytest.approx([rate_at(1e-3, epoch / 3, "cosine") for epoch in (0, 0, 1, 1, 2, 2)])


def test_bfloat16_autocast_trains_as_float32_does_and_keeps_float32_weights() -> None:
    data = _data("in-context-recall")
    losses = {}
    for precision in ("float32", "bfloat16"):
        config = _tiny(precision=precision, steps=20, width=32)
        model = build(config, data.setting, "exact-flow", 0)  # type: ignore[attr-defined]
        result = train(model, data, config, rate=3e-3, decay=0.0, seed=0, report=_quiet)  # type: ignore[arg-type]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert result.diverged_at is None
        losses[precision] = result.scores[-1][1].loss
    assert losses["float32"] < 0.8 * math.log(16)  # a model that knows nothing of 16 tokens
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.03)


def test_a_cell_on_a_gpu_asks_the_cluster_for_its_share_and_cannot_be_timed_without_one() -> None:
    config = replace(_tiny(), device="cuda", gpu_share=0.25)
    assert Mad(config).gpus_per_cell == 0.25
    assert Mad(_tiny()).gpus_per_cell == 0.0
    if not torch.cuda.is_available():
        assert Mad(config).expected_seconds(Mad(config).cells(), 1) is None
    with pytest.raises(ValueError, match="gpu_share"):
        replace(config, gpu_share=0.0)


def test_the_command_runs_resumes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "mad", "--steps", "4", "--executor", "inline", "--output", str(tmp_path / "run")]
    assert cli.main([*command, "--tasks", "memorization"]) == 0
    assert "memorization, short" in capsys.readouterr().out
    assert cli.main([*command, "--tasks", "memorization", "compression"]) == 0
    captured = capsys.readouterr()
    assert "2 of 4 cells are in" in captured.err and "compression, short" in captured.out
    assert {row["task"] for row in read_rows(tmp_path / "run")} == {"memorization", "compression"}
    assert cli.main([*command, "--schedule", "cosine"]) == 1
    assert "schedule: constant there, cosine now" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]) == 0
    assert "MAD: six synthetic tasks (quick profile)" in (tmp_path / "report.html").read_text()
