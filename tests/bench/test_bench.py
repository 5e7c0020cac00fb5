"""The benchmark measures what it says, and refuses when a result is wrong. No test asserts a time."""

from __future__ import annotations

import pytest
import torch

from efla import EflaForCausalLM, cli, presets
from efla.bench import BACKENDS, PLAIN, kernel_contenders, scan
from efla.bench.models import efla_model, llama_model
from efla.bench.qwen import qwen_model
from efla.bench.section import growth_figure, lengths_figure, save_lengths
from efla.native import rows
from efla.runs import timing
from efla.scans.backends import chunked, native

needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=f"backend 'native' {native.unavailable()}")


def test_contenders_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    measured = timing.compare("work", calls, threads=1, rounds=3, repeats=2, useful_flops=1e9)
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert [m.contender for m in measured] == ["a", "b"]
    assert measured[0].gflops == pytest.approx(1 / measured[0].median)


def test_short_work_is_repeated_until_a_sample_is_long_enough(monkeypatch):
    clock, calls = [0.0], {"short": 0, "long": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(name, seconds):
        calls[name] += 1
        clock[0] += seconds

    contenders = {n: lambda n=n, s=s: work(n, s) for n, s in (("short", 2**-10), ("long", 2**-5))}
    measured = timing.compare("work", contenders, threads=1, rounds=2, sample_seconds=2**-6)
    # Two calls to see how long it takes, one unmeasured, two samples: of 16 calls, and of one.
    assert calls == {"short": 2 + 1 + 2 * 16, "long": 2 + 1 + 2 * 1}
    assert [m.median for m in measured] == [2**-10, 2**-5]


def test_useful_work_is_six_k_v_a_token_and_head():
    assert scan.Size(2, 10, 3, 64).flops(scan.FORWARD_FLOPS) == 2 * 10 * 3 * 6 * 64 * 64


@needs_native
def test_a_wrong_backend_gets_no_numbers(monkeypatch, capsys):
    true_forward = chunked.forward

    def slightly_wrong(*arguments, **options):
        result = true_forward(*arguments, **options)
        return result._replace(o=result.o * 1.001)

    monkeypatch.setattr(chunked.BACKEND, "forward", slightly_wrong)
    assert cli.main(["bench", "--rounds", "1"]) == 1
    captured = capsys.readouterr()
    assert "'chunked' is wrong" in captured.err
    assert "GFLOP" not in captured.out


def test_a_plot_needs_no_more_than_rows(tmp_path):
    measured = [
        timing.Measurement(f"length, forward B1 T{length} H8 D{width}", "native", 1, ms / 1e3, 1e-3, 1e-3, 3)
        for length, width, ms in ((1024, 64, 2.0), (512, 64, 1.0), (512, 128, 3.0))
    ]
    found = lengths_figure(measured, "plot", "a machine")
    assert [chart.title for chart in found.charts] == ["8 heads of width 64", "8 heads of width 128"]
    assert [(p.x, p.y) for p in found.charts[0].series[0].points] == [(512, 1.0), (1024, 2.0)]
    assert [one.label for one in found.legend] == ["efla, native"]
    with pytest.raises(ValueError, match="unknown format of a figure 'gif'"):
        save_lengths(measured, tmp_path / "plot.gif", "a machine")
    pytest.importorskip("altair")
    save_lengths(measured, tmp_path / "plot.png", "a machine")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_growth_is_shown_for_each_token_and_head():
    measured = [
        timing.Measurement(f"growth of {axis}, forward", str(size), 1, seconds, 0, 0, 3, memory=memory)
        for axis, size, seconds, memory in (
            ("tokens", scan.Size(1, 100, 8, 64), 8e-6, 1600),
            ("tokens", scan.Size(1, 200, 8, 64), 32e-6, 3200),
            ("sequences", scan.Size(3, 100, 2, 64), 6e-6, None),
        )
    ]
    found = growth_figure(measured, "growth", "a machine")
    time, memory, *training = found.charts
    assert [[(p.x, p.y) for p in one.points] for one in time.shown] == [[(800, 10), (1600, 20)], [(600, 10)]]
    assert [[(p.x, p.y) for p in one.points] for one in memory.shown] == [[(800, 2), (1600, 2)]]
    assert not any(chart.shown for chart in training)


@pytest.mark.parametrize(("make", "arm"), [(qwen_model, "gated-delta"), (llama_model, "attention")])
def test_models_of_transformers_match_ours_in_size(make, arm):
    config = presets.arm(arm, "full")
    sizes = [sum(p.numel() for p in model.parameters()) for model in (EflaForCausalLM(config), make(config))]
    assert abs(sizes[1] / sizes[0] - 1) < 0.02


def test_the_model_of_the_suites_has_the_size_of_its_peer():
    ours = efla_model()
    theirs = qwen_model(ours.config)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02


@needs_native
def test_only_the_plain_contender_runs_without_the_compiled_kernels() -> None:
    x = torch.randn(128, 128)
    calls = {name: (lambda: rows.l2_norm(x, 1e-6)) for name in BACKENDS}
    compiled = {name: call() is not None for name, call in kernel_contenders(calls).items()}
    assert compiled == {"native": True, "chunked": True, PLAIN: False}


def test_a_training_step_returns_the_loss_and_clips() -> None:
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    step = timing.training_step(weight, optimizer, lambda: 10 * weight(torch.ones(1)).sum(), clip=0.5)
    with torch.no_grad():
        assert [step(), step()] == pytest.approx([10, 5], abs=1e-4)
