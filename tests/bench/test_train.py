"""``efla bench train`` measures what it says; no test asserts a time."""

from __future__ import annotations

import pytest

from efla import cli
from efla.bench import gate
from efla.bench import train as bench
from efla.scans.backends import native


def test_models_of_transformers_match_ours_in_size():
    from efla import EflaForCausalLM, presets

    for theirs, arm in (
        (bench.gated_delta_of_transformers(), "gated-delta"),
        (bench.softmax_of_transformers(), "attention"),
    ):
        ours = EflaForCausalLM(presets.arm(arm, "full"))
        sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
        assert abs(sizes[1] / sizes[0] - 1) < 0.02, arm


@pytest.mark.skipif(native.unavailable() is not None, reason=f"backend 'native' {native.unavailable()}")
def test_every_suite_runs(monkeypatch, tmp_path, capsys):
    for name, value in {"LENGTH": 16, "ROWS": 2, "PROFILE": "quick", "SGEMM_SIZE": 16, "LOOP_STEPS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "PREPARE_MEGABYTES", 0.5)
    monkeypatch.setattr(gate, "check_contenders", lambda: None)
    assert cli.main(["bench", "train", "--rounds", "2", "--output", str(tmp_path / "rows.json")]) == 0
    shown = capsys.readouterr().out
    assert "efla: " in shown and "tokens/s" in shown
    assert "share of the loop outside forward, backward and optimizer" in shown
    assert "MB/s in one process" in shown
