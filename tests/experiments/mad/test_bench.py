"""The benchmark of a MAD training step runs and compares backends that compute the same; no time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from efla import cli
from efla.bench import gate
from efla.bench.kernels import BACKENDS, PLAIN, contenders
from efla.experiments.mad import bench as mad
from efla.experiments.mad.config import profile
from efla.experiments.mad.speed import stepper
from efla.native import rows
from efla.scans.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"backend 'native' {native.unavailable()}")


def test_every_suite_times_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mad, "BATCH", 2)
    monkeypatch.setattr(mad, "TASKS", ("compression", "memorization"))
    groups = [group for suite in mad.SUITES.values() for group in suite(1, 1)]
    assert [[m.contender for m in group] for group in groups] == [["native", "chunked", PLAIN, "sgemm"]] * 2 + [
        ["native", "chunked"]
    ]
    assert all(m.median > 0 for group in groups for m in group)


def test_the_bound_counts_a_step_s_matrix_products_and_not_its_scan() -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    assert mad._matrix_flops(lambda: torch.autograd.grad((a @ b).sum(), (a, b))) == 3 * 2 * 6 * 5 * 7
    assert mad._matrix_flops(mad._scan_call("native")) == 0
    config, batch = profile("full"), 2
    step = stepper(config, config.setting("in-context-recall", "baseline"), "exact-flow", batch)
    mixer, feed_forward, head = 4 * 128 * 128 + 4 * 128, 3 * 128 * 352, 16 * 128  # weights of the linear maps
    assert mad._matrix_flops(step) == 3 * 2 * (batch * 127) * (2 * mixer + 2 * feed_forward + head)


def test_the_command_knows_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "mad", "--suite", "steps"]) == 1
    assert "step" in capsys.readouterr().err


def test_what_a_suite_remarks_is_kept_out_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "check_contenders", lambda: None)
    monkeypatch.setattr(mad, "BATCH", 2)
    monkeypatch.setattr(mad, "TASKS", ("compression",))
    assert cli.main(["bench", "mad", "--suite", "step", "--rounds", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 4
    assert "compression: matrix products outside the scan take" in printed.err


def test_a_timed_step_is_a_training_step_and_the_backends_agree_on_it() -> None:
    torch.use_deterministic_algorithms(False)
    config = profile("quick")
    setting = config.setting("in-context-recall", "short")
    steps = {name: stepper(replace(config, backend=b), setting, "exact-flow", 4) for name, b in BACKENDS.items()}
    losses = {step.name: [step.call() for _ in range(4)] for step in contenders(steps)}
    assert losses["native"][-1] < losses["native"][0]
    assert losses["native"] == pytest.approx(losses["chunked"], rel=1e-4)
    assert losses["native"] == pytest.approx(losses[PLAIN], rel=1e-4)


def test_only_the_plain_contender_runs_without_the_compiled_kernels() -> None:
    x = torch.randn(128, 128)
    calls = {name: (lambda: rows.l2_norm(x, 1e-6)) for name in BACKENDS}
    compiled = {contender.name: contender.call() is not None for contender in contenders(calls)}
    assert compiled == {"native": True, "chunked": True, PLAIN: False}
