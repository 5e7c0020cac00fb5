"""benchmarks/runtimes.py at a small size: every runtime decodes, and rows say what it cost. No test asserts a time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from efla.native import missing

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(missing() is not None, reason="the kernels are not built")

spec = importlib.util.spec_from_file_location("runtimes", Path(__file__).parents[2] / "benchmarks/runtimes.py")
assert spec is not None and spec.loader is not None
runtimes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtimes)
ONNX = [f"ONNX Runtime {kind}" for kind in runtimes.QUANTISED]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The rows after a run of the command for models of one layer."""
    small = {"MODELS": dict.fromkeys(("one", "two"), (32, 1, 2, 48, 2)), "TOKENS": 4, "HELD_OUT": 2, "LENGTH": 64}
    for name, value in small.items():
        monkeypatch.setattr(runtimes, name, value)

    output = tmp_path / "rows.json"
    output.write_text(json.dumps({"rows": [{"model": "before", "threads": 1, "contender": "this run"}]}))

    def main(*options):
        paths = ["--work", str(tmp_path / "work"), "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["runtimes.py", *paths, "--rounds", "1", *options])
        runtimes.main()
        return json.loads(output.read_text())["rows"]

    return main


def test_every_runtime_gets_a_row_and_rows_of_other_models_stay(run, monkeypatch):
    monkeypatch.setattr(runtimes, "chromium", lambda: None)
    run("--models", "one")
    monkeypatch.setattr(runtimes, "training_step", None)  # the model is trained already
    other, *rows = run("--models", "one")
    assert other["model"] == "before"
    assert [row["contender"] for row in rows] == ["torch, generate", "efla, generate", "efla, decode loop", *ONNX]
    assert all(row["same_tokens"] for row in rows[:4])
    assert 0 < rows[5]["bytes"] < rows[4]["bytes"] < rows[3]["bytes"]
    assert rows[0]["held_out_loss"] == pytest.approx(rows[3]["held_out_loss"], rel=1e-5)


@pytest.mark.browser
@pytest.mark.skipif(runtimes.chromium() is None, reason="no chromium here (Debian: apt-get install chromium)")
def test_the_browser_decodes_the_weights_that_the_loss_is_of(run):
    rows = {row["contender"]: row for row in run("--models", "two")}
    row = rows["browser, the explainer's decoder"]
    assert row["per_second"] > 0 and row["bytes"] > 0
    assert row["held_out_loss"] == pytest.approx(rows["efla, generate"]["held_out_loss"], rel=0.05)
