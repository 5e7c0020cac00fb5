"""The benchmark measures what it says, and refuses when a result is wrong. No test asserts a time."""

from __future__ import annotations

import json

import pytest

from efla import cli
from efla.bench import gate, models, scan
from efla.bench.kernels import PLAIN
from efla.bench.plot import plot_lengths
from efla.experiments.smnist import bench as smnist
from efla.experiments.smnist.speed import Stepper
from efla.runs import timing
from efla.scans.backends import chunked, native

TINY = scan.Size(1, 24, 1, 16)

needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=f"backend 'native' {native.unavailable()}")


def test_contenders_take_turns():
    order = []
    contenders = [timing.Contender(name, lambda name=name: order.append(name), repeats=2) for name in "ab"]
    measured = timing.compare("work", contenders, threads=1, rounds=3, useful_flops=1e9)
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert [m.contender for m in measured] == ["a", "b"]
    assert measured[0].gflops == pytest.approx(1 / measured[0].median)


def test_short_work_is_repeated_until_a_sample_is_long_enough(monkeypatch):
    clock, calls = [0.0], {"short": 0, "long": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(name, seconds):
        calls[name] += 1
        clock[0] += seconds

    contenders = [timing.Contender(n, lambda n=n, s=s: work(n, s)) for n, s in (("short", 2**-10), ("long", 2**-5))]
    measured = timing.compare("work", contenders, threads=1, rounds=2, sample_seconds=2**-6)
    # Two calls to see how long it takes, one unmeasured, two samples: of 16 calls, and of one.
    assert calls == {"short": 2 + 1 + 2 * 16, "long": 2 + 1 + 2 * 1}
    assert [m.median for m in measured] == [2**-10, 2**-5]


def test_useful_work_is_six_k_v_a_token_and_head():
    assert scan.Size(2, 10, 3, 64).flops(scan.FORWARD_FLOPS) == 2 * 10 * 3 * 6 * 64 * 64


@needs_native
def test_every_suite_runs_and_the_command_writes_its_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scan, "HEADLINE", [TINY] * 2)
    monkeypatch.setattr(scan, "LENGTHS", [16, 32])
    monkeypatch.setattr(scan, "DECODE_BATCHES", [1])
    monkeypatch.setattr(scan, "SGEMM_SIZE", 16)
    monkeypatch.setattr(scan, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(gate, "check_contenders", lambda: None)
    output, plot = tmp_path / "new" / "rows.json", tmp_path / "lengths.svg"
    assert cli.main(["bench", "--rounds", "2", "--output", str(output), "--plot", str(plot)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert {row["contender"] for row in rows} >= {
        "native",
        "chunked",
        "transformers",
        "softmax attention",
        "sgemm",
        "efla",
    }
    assert all(
        row["median"] > 0 and row["rounds"] == 2 for row in rows if not row["work"].startswith(("length", "decode"))
    )
    assert "<svg" in plot.read_text()
    assert cli.main(["bench", "scan", "--suite", "decode", "--rounds", "2", "--output", str(output)]) == 0
    assert "in place of those of 2" in capsys.readouterr().out, "rows are not replaced in silence"
    assert cli.main(["bench", "scan", "--suite", "decode", "--plot", str(plot)]) == 1
    assert "--plot draws the suite lengths" in capsys.readouterr().err
    assert cli.main(["bench", "--rounds", "2"]) == 0
    assert "forward+backward B1 T24 H1 D16" in capsys.readouterr().out


@needs_native
def test_a_wrong_backend_gets_no_numbers(monkeypatch, capsys):
    true_forward = chunked.forward

    def slightly_wrong(request, save):
        result = true_forward(request, save)
        return result._replace(o=result.o * 1.001)

    monkeypatch.setattr(chunked, "forward", slightly_wrong)
    assert cli.main(["bench", "--rounds", "1"]) == 1
    captured = capsys.readouterr()
    assert "'chunked' is wrong" in captured.err
    assert "GFLOP" not in captured.out


def test_a_plot_needs_no_more_than_rows(tmp_path):
    rows = [
        timing.Measurement(f"length, forward B1 T{length} H8 D64", "native", 1, 1e-3, 1e-3, 1e-3, 3)
        for length in (512, 1024)
    ]
    plot_lengths(rows, tmp_path / "plot.png", "a machine")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@needs_native
def test_models_are_compared_at_matched_size_and_their_state_is_what_the_formula_says(monkeypatch, capsys):
    monkeypatch.setattr(models, "PREFILL_LENGTH", 16)
    monkeypatch.setattr(models, "CONTEXTS", (20, 40))
    monkeypatch.setattr(models, "HIDDEN", 64)
    monkeypatch.setattr(models, "WIDTH", 16)
    monkeypatch.setattr(models, "MLP", 96)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (models.efla_model(), models.transformers_model())]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02
    measured = [m for suite in models.SUITES.values() for group in suite(1, 1) for m in group]
    assert {m.contender for m in measured} >= {"transformers Qwen3.5", "efla after 20", "softmax after 40"}
    assert "as the formula says" in capsys.readouterr().out


def test_an_unknown_suite_is_named(capsys):
    assert cli.main(["bench", "models", "--suite", "thruput"]) == 1
    assert "known suites: throughput, contexts" in capsys.readouterr().err


@needs_native
def test_the_classifier_is_timed_in_images_per_second(monkeypatch, capsys):
    monkeypatch.setattr(gate, "check_contenders", lambda: None)
    monkeypatch.setattr(smnist, "MAIN_ARMS", ("exact-flow",))
    monkeypatch.setattr(smnist, "Stepper", lambda backend, arm: Stepper(backend, arm, length=196, batch=2))
    assert cli.main(["bench", "smnist", "--rounds", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["contender"] for row in rows] == ["native", "chunked", PLAIN]
    assert all(row["per_second"] == pytest.approx(2 / row["median"]) and 0 < row["scan_share"] < 1 for row in rows)
