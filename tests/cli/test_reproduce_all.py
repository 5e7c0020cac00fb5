"""``efla reproduce all``: every experiment, one report; one that cannot run does not stop the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro

from efla.cli.reproduce import All, reproduce
from efla.experiments import registry
from efla.experiments.exactness.config import ExactnessOptions
from efla.experiments.exactness.run import Exactness
from efla.experiments.experiment import Cell, Report
from efla.experiments.lm.config import LmOptions
from efla.experiments.smnist.config import SmnistOptions
from efla.experiments.throughput.config import ThroughputOptions
from efla.runs.records import Record


def test_it_knows_every_experiment_and_passes_on_profile_and_data() -> None:
    options = All(profile="full", data="somewhere").options()
    assert sorted(map(registry.name_of, options)) == sorted(registry.names())
    assert {o.profile for o in options} == {"full"}
    assert {registry.name_of(o) for o in options if getattr(o, "data", None) == "somewhere"} == {"smnist", "lr", "lm"}


def test_without_data_every_experiment_has_an_embedded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFLA_DATA", raising=False)
    (lm,) = (o for o in All(profile="full").options() if isinstance(o, LmOptions))
    assert lm.config().corpus == "python-docs"


def test_an_experiment_that_fails_half_way_is_in_the_report_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "jinja2"):
        pytest.importorskip(package)
    original = Exactness.run_cell

    def fails_once(self: Exactness, cell: Cell, report: Report) -> list[Record]:
        if cell == self.cells()[-1]:
            raise RuntimeError("made to fail")
        return original(self, cell, report)

    monkeypatch.setattr(Exactness, "run_cell", fails_once)
    monkeypatch.setattr(All, "options", lambda self: [ExactnessOptions(rules=("delta", "efla"))])
    assert tyro.cli(reproduce, args=["all", "--output", str(tmp_path / "runs"), "--executor", "inline"]) == 1
    assert "not run, or in part: exactness" in capsys.readouterr().out
    assert "What an exact step buys" in (tmp_path / "runs" / "report-quick.html").read_text()


def test_one_report_of_what_ran_and_a_word_on_what_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "jinja2"):
        pytest.importorskip(package)
    monkeypatch.setattr(
        All,
        "options",
        lambda self: [
            ExactnessOptions(rules=("delta", "efla")),
            SmnistOptions(data=str(tmp_path / "nowhere")),
            ThroughputOptions(tokens=32, lengths=(16, 32), rounds=2, arms=("delta-l2", "exact-flow"), device="cpu"),
        ],
    )
    code = tyro.cli(
        reproduce, args=["all", "--output", str(tmp_path / "runs"), "--executor", "inline", "--threads", "1"]
    )
    printed = capsys.readouterr().out
    assert code == 1
    assert printed.index("smnist cannot run: --data") < printed.index("== What an exact step buys =="), "told at once"
    assert "not run, or in part: smnist (" in printed
    page = (tmp_path / "runs" / "report-quick.html").read_text()
    assert "What an exact step buys" in page
    assert "Training throughput" in page
    assert (tmp_path / "runs" / "exactness-quick" / "rows.jsonl").exists()
    assert not (tmp_path / "runs" / "smnist-quick").exists()
