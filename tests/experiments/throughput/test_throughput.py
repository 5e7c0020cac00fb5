"""The throughput measurement: arms in turn, ratios within a round, verdicts from rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from rich.console import Console

from efla.cli.reproduce import reproduce
from efla.experiments.runner import run
from efla.experiments.throughput import claims
from efla.experiments.throughput.config import Shape, ThroughputConfig, ThroughputOptions, shapes_of
from efla.experiments.throughput.run import Throughput, build_step
from efla.runs.rows import read_rows


def tiny(**changes: Any) -> ThroughputConfig:
    fields: dict[str, Any] = {
        "profile": "quick", "size": "quick", "arms": ("delta-l2", "exact-flow", "attention"), "rounds": 3,
        "settings": (Shape(16, 2), Shape(32, 1)),
    }  # fmt: skip
    return ThroughputConfig(**(fields | changes))


def made_up(times: dict[str, list[float]], **fields: Any) -> list[dict[str, Any]]:
    """Rows of two settings with the given seconds."""
    rows = []
    for length, batch in ((128, 8), (1024, 1)):
        rows.append(
            {
                "row": "cell", "cell": f"length={length} batch={batch}", "length": length, "batch": batch, "tokens": 1024,
                "arms": {arm: {"parameters": 100, "flops_per_token": 3} for arm in times},
                "timing": {arm: {"seconds": s, "peak_memory_growth": 10**6} for arm, s in times.items()},
                "device": "cpu", "threads": 2, "wall_seconds": 1.0, "started": "2026-01-01T00:00:00", "versions": {},
                "commit": None, "machine": {}, **fields,
                "config": {"profile": "quick", "size": "quick", "precision": "float32"},
            }
        )  # fmt: skip
    return rows


def test_a_cell_times_every_arm_as_often_and_keeps_every_sample(tmp_path: Path) -> None:
    run(Throughput(tiny()), tmp_path, executor="inline", console=Console(quiet=True))
    rows = read_rows(tmp_path)
    assert [(row["length"], row["batch"], row["tokens"]) for row in rows] == [(16, 2, 32), (32, 1, 32)]
    for row in rows:
        assert set(row["timing"]) == {"delta-l2", "exact-flow", "attention"}
        assert all(len(timing["seconds"]) == 3 for timing in row["timing"].values())
        assert all(seconds > 0 for timing in row["timing"].values() for seconds in timing["seconds"])
        assert row["arms"]["exact-flow"]["parameters"] == 471_296
    assert "EFLA over DeltaNet" in Throughput.text_summary(rows)
    pytest.importorskip("altair")
    names = ["throughput.svg", "throughput-dark.svg", "throughput.png"]
    assert [file.name for file in Throughput.plot(rows, tmp_path)] == names


def test_what_is_timed_is_a_training_step_that_changes_the_weights() -> None:
    model, step = build_step(tiny(), "exact-flow", Shape(16, 2))
    before = [p.clone() for p in model.parameters()]
    with torch.no_grad():  # as the timing of others does
        step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True) if b.grad is not None)
    assert all(p.grad is not None for p in model.parameters())


def test_the_ratio_is_taken_within_a_round() -> None:
    slow = [1.0, 2.0, 4.0, 8.0, 16.0]  # the machine slows down; the pair alike
    (row, _) = made_up({"delta-l2": slow, "exact-flow": [1.25 * s for s in slow]})
    ratio = claims.quartiles(claims.ratios(row, "exact-flow", "delta-l2"))
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == pytest.approx((0.8, 0.8, 0.8, 5))
    speed = claims.tokens_per_second(row, "delta-l2")
    assert speed.median == 256.0
    flops = row["arms"]["delta-l2"]["flops_per_token"]
    assert claims.operations(row, "delta-l2") == f"{256.0 * flops / 1e9:,.1f}"


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0, 1.0], "seen"),
        ([1.04, 1.03, 1.04, 1.03, 1.04], "seen"),
        ([1.04, 1.0, 1.08, 1.04, 1.04], "not seen"),  # the mean is within 5 %, its interval is not
        ([1.1, 1.11, 1.1, 1.1, 1.1], "reversed"),
        ([0.9, 0.91, 0.9, 0.9, 0.9], "reversed"),
    ],
)
def test_nearly_identical_means_an_interval_within_five_percent_in_every_setting(
    times: list[float], verdict: str
) -> None:
    rows = made_up({"delta-l2": [1.0] * 5, "exact-flow": times})
    each, mean, parameters = claims.claims(rows)
    assert each.verdict == mean.verdict == verdict
    assert parameters.verdict == "seen"
    rows[1]["timing"]["exact-flow"]["seconds"] = [1.5] * 5
    each, mean, _ = claims.claims(rows)
    assert each.verdict == "reversed" and each.reason.startswith("shown: 1,024×1")  # noqa: RUF001


def test_one_round_is_not_judged_and_more_parameters_are_noticed() -> None:
    rows = made_up({"delta-l2": [1.0], "exact-flow": [1.0]})
    rows[0]["arms"]["exact-flow"]["parameters"] = 101
    each, mean, parameters = claims.claims(rows)
    assert each.verdict == mean.verdict == "not judged"
    assert parameters.verdict == "not seen"


def test_settings_have_the_same_tokens_and_bad_ones_are_refused() -> None:
    assert shapes_of(1024, (128, 512)) == (Shape(128, 8), Shape(512, 2))
    with pytest.raises(ValueError, match="do not divide 1000 tokens"):
        shapes_of(1000, (128,))
    with pytest.raises(ValueError, match=r"unknown arm 'delta_raw'; did you mean 'delta-raw'"):
        tiny(arms=("delta_raw",))
    assert tiny(size="340m").model_config("exact-flow").hidden_size == 1024
    assert tiny(size="340m").model_config("delta-raw").key_norm is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="--device cuda cannot be used here"):
        ThroughputOptions(device="cuda").config()
    assert ThroughputOptions().config().device == "cpu"


def test_the_command_runs_one_cell_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import efla.cli.reproduce as module

    asked: dict[str, Any] = {}
    monkeypatch.setattr("efla.experiments.runner.run", lambda experiment, folder, **kwargs: asked.update(kwargs))
    monkeypatch.setattr(module, "read_rows", lambda folder: made_up({"delta-l2": [1.0] * 5}))
    monkeypatch.setattr(Throughput, "plot", classmethod(lambda cls, rows, folder: []))
    arguments = ["throughput", "--workers", "4", "--output", str(tmp_path)]
    tyro.cli(reproduce, args=arguments)
    assert asked["workers"] == 1
    assert asked["threads"] >= 1
