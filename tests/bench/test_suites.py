"""Every suite of ``efla bench`` runs at a small size and writes its rows. No test asserts a time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import efla.bench
from efla import cli
from efla.bench import PLAIN, evaluation, models, qwen, scan, train
from efla.experiments.mad import bench as mad
from efla.experiments.smnist import bench as smnist
from efla.scans.backends import native
from tests.evaluation.small_data import write_small_data

TINY = scan.Size(1, 24, 1, 16)


class Small(NamedTuple):
    """A benchmark at a small size: what is replaced in its module, which contenders it times, what it prints, and
    what is replaced in other modules."""

    module: Any
    values: dict[str, Any]
    contenders: set[str]
    printed: tuple[str, ...] = ()
    others: tuple[tuple[Any, dict[str, Any]], ...] = ()


SMALL = {
    "scan": Small(
        scan,
        {
            "HEADLINE": [TINY] * 2,
            "LENGTHS": [16, 32],
            "SHORT_LENGTHS": [24],
            "GROWTH": {"tokens": [TINY] * 2, "sequences": [TINY], "heads": [TINY]},
            "DECODE_BATCHES": [1],
            "SGEMM_SIZE": 16,
            "SAMPLE_SECONDS": 0.0,
            "CALLS": 2,
        },
        {
            "native",
            scan.ALONE,
            "native, 1 thread",
            "chunked",
            "transformers",
            "softmax attention",
            "sgemm",
            "efla",
            "bound functions",
            "autograd alone",
        },
        ("forward+backward B1 T24 H1 D16", "transformers "),
    ),
    "models": Small(
        models,
        {
            **{"PREFILL_LENGTH": 16, "CONTEXTS": (20, 40), "HIDDEN": 64, "MLP": 96},
            **{"SIZES": ("efla 4x64",), "PROMPT": 16, "TOKENS": 2, "CONTEXT": 20},
            "SUITES": {
                **{name: run for name, run in models.SUITES.items() if "wide" not in name},  # as the others, but wide
                "qwen": qwen.suite(64, 4, torch.float32),
                "qwen-bfloat16": qwen.suite(64, 4, torch.bfloat16),
            },
        },
        {"transformers Qwen3.5", "efla after 20", "softmax after 40", models.MODEL, models.FLOOR}
        | {models.ACCELERATED, "decode, logged", "load", "int8 weights"},
        ("as the formula says",),
        ((qwen, {"LENGTH": 16, "TOKENS": 2, "HEAD_DIM": 16}), (efla.bench, {"PIECE": 10})),
    ),
    "train": Small(
        train,
        {"LENGTH": 16, "ROWS": 2, "PROFILE": "quick", "SGEMM_SIZE": 16, "LOOP_STEPS": 2, "PREPARE_MEGABYTES": 0.5},
        {"efla", "efla on chunked", "gated delta", "transformers Qwen3.5 (gated delta)", "transformers Llama (softmax)"}
        | {"sgemm", "forward and backward", "with clipping and AdamW", "the whole loop", "prepare"},
        ("efla: ", "tokens/s", "share of the loop outside forward, backward and optimizer", "MB/s in one process"),
    ),
    "smnist": Small(
        smnist,
        {
            "MAIN_ARMS": ("exact-flow",),
            "Stepper": lambda config, arm, make=smnist.Stepper: make(replace(config, length=196, batch=2), arm),
        },
        {"native", "chunked", PLAIN},
    ),
    "mad": Small(
        mad,
        {"BATCH": 2, "TASKS": ("compression", "memorization")},
        {"native", "chunked", PLAIN, "sgemm"},
        ("compression: matrix products outside the scan take",),
    ),
    "evaluation": Small(
        evaluation,
        {"MODELS": {"efla, bytes": {"rule": "efla", "vocab_size": 256}}, "PLAIN_ROWS": (4,)},
        {"shared prefill", "plain, 4 rows"},
        ("HellaSwag",),
    ),
}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run ``efla bench WHAT`` at a small size, without the correctness check."""
    if native.unavailable() is not None:
        pytest.skip(f"backend 'native' {native.unavailable()}")
    monkeypatch.setattr(efla.bench, "check_contenders", lambda: None)

    def run(what, *options):
        if what == "evaluation":
            pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
            monkeypatch.setenv("EFLA_DATA", str(write_small_data(tmp_path / "data")))
        for module, values in ((SMALL[what].module, SMALL[what].values), *SMALL[what].others):
            for name, value in values.items():
                monkeypatch.setattr(module, name, value)
        return cli.main(["bench", what, "--rounds", "2", *map(str, options)])

    return run


@pytest.mark.parametrize("what", SMALL)
def test_every_suite_runs_and_the_command_writes_its_rows(what, bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    output = tmp_path / "new" / "rows.json"
    assert bench(what, "--output", output) == 0
    rows = json.loads(output.read_text())["rows"]
    assert {row["contender"] for row in rows} >= SMALL[what].contenders
    assert all(row["median"] > 0 and row["rounds"] in (2, 6) for row in rows)
    shown = capsys.readouterr().out
    assert all(text in shown for text in SMALL[what].printed)
    assert len(shown.splitlines()) <= 25
    lines = [line for line in shown.splitlines() if line.startswith(tuple(row["work"][:32] for row in rows))]
    assert 0 < max(map(len, lines)) <= 80


def test_details_are_shown_when_asked_for(bench, capsys):
    assert bench("scan", "--suite", "headline", "--verbose") == 0
    shown = capsys.readouterr().out
    assert "quartiles" in shown
    assert "of sgemm" in shown


def test_rows_are_not_replaced_in_silence_and_lengths_can_be_plotted(bench, tmp_path, capsys):
    output, plot = tmp_path / "rows.json", tmp_path / "lengths.svg"
    assert bench("scan", "--suite", "lengths", "--output", output, "--plot", plot) == 0
    assert "<svg" in plot.read_text()
    assert bench("scan", "--suite", "decode", "--output", output) == 0
    assert "replacing those of 2" in capsys.readouterr().out
    assert bench("scan", "--suite", "decode", "--plot", plot) == 1
    assert "--plot draws the suite lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "suite", "known"),
    [("models", "thruput", "throughput, contexts, decode, weights, prefill, step"), ("mad", "steps", "step, scan")],
)
def test_an_unknown_suite_is_named(what, suite, known, capsys):
    assert cli.main(["bench", what, "--suite", suite]) == 1
    assert f"known suites: {known}" in capsys.readouterr().err


def test_each_mad_task_times_every_backend_and_the_matrix_product(bench, tmp_path):
    assert bench("mad", "--output", tmp_path / "rows.json") == 0
    contenders = [row["contender"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    assert contenders == ["native", "chunked", PLAIN, "sgemm"] * 2 + ["native", "chunked"]


def test_what_a_suite_prints_is_kept_out_of_json(bench, capsys):
    assert bench("mad", "--suite", "step", "--json") == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 8
    assert "compression: matrix products outside the scan take" in printed.err


def test_the_classifier_is_timed_in_images_per_second(bench, capsys):
    assert bench("smnist", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["contender"] for row in rows] == ["native", "chunked", PLAIN]
    assert all(row["per_second"] == pytest.approx(2 / row["median"]) and 0 < row["scan_share"] < 1 for row in rows)


def test_a_wrong_score_gets_no_numbers(bench, monkeypatch, capsys):
    shared = evaluation._call

    def wrong(lm, requests):
        call = shared(lm, requests)
        return (lambda: [(value + 1e-3, greedy) for value, greedy in call()]) if lm.share else call

    monkeypatch.setattr(evaluation, "_call", wrong)
    assert bench("evaluation") == 1
    assert "no speed is reported" in capsys.readouterr().err


def test_without_data_the_error_says_what_to_set(monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
    monkeypatch.setattr(efla.bench, "check_contenders", lambda: None)
    monkeypatch.delenv("EFLA_DATA", raising=False)
    assert cli.main(["bench", "evaluation", "--rounds", "1"]) == 1
    assert "set EFLA_DATA" in capsys.readouterr().err
