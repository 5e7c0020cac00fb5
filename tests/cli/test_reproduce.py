"""The command line of the experiments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tyro

from efla.cli.report import report
from efla.cli.reproduce import reproduce
from efla.experiments import registry
from efla.experiments.smnist.config import LrOptions, SmnistOptions
from efla.experiments.smnist.data import choose_source
from efla.experiments.smnist.run import SmnistRobustness
from efla.runs.rows import read_rows
from efla.train import recipes
from efla.train.config import resolve_model
from tests.fresh import run_fresh

ROOT = Path(__file__).parents[2]


def _cli(*arguments: str) -> object:
    return tyro.cli(reproduce, args=list(arguments))


def test_exactness_runs_draws_and_prints_its_table_and_then_makes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("altair", "vl_convert", "jinja2"):
        pytest.importorskip(package)
    _cli("exactness", "--rules", "delta", "efla", "--output", str(tmp_path / "out"))
    printed = capsys.readouterr().out
    assert re.search(r"EFLA +exact", printed)
    assert (tmp_path / "out" / "exactness.svg").exists()
    assert len(read_rows(tmp_path / "out")) == 6
    page = tmp_path / "report.html"
    tyro.cli(report, args=[str(tmp_path / "out"), "--output", str(page)])
    assert str(page) in capsys.readouterr().out
    assert "What an exact step buys" in page.read_text()


@pytest.mark.parametrize("name", registry.names())
def test_a_summary_of_the_committed_rows_fits_a_terminal(name: str) -> None:
    folders = list((ROOT / "results").glob(f"{registry.get(name).folder_name()}*"))
    assert folders
    for folder in folders:
        lines = registry.get(name).text_summary(read_rows(folder)).splitlines()
        assert len(lines) <= 22, "a blank line, where the files are and the next command follow"
        assert max(map(len, lines)) <= 80


def test_a_report_of_all_committed_rows_ends_in_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efla.report.page._render", lambda *arguments, **names: "")
    folders = [str(path) for path in (ROOT / "results").iterdir()]
    tyro.cli(report, args=[*folders, "--output", str(tmp_path / "report.html")])
    *lines, place, following = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23 and max(map(len, lines[1:])) <= 80
    assert sum(line.endswith("EFLA degrades more slowly under Gaussian noise") for line in lines) == 1, (
        "of two protocols"
    )
    assert place == f"report: {tmp_path / 'report.html'}" and following.startswith("next: ")


def test_without_the_packages_for_charts_a_run_says_so_first_and_draws_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efla.runs.vega.find_spec", lambda name: None)
    _cli("exactness", "--rules", "efla", "--output", str(tmp_path))
    printed = capsys.readouterr().out
    assert printed.startswith("no figures: charts need altair and vl_convert: pip install 'efla[experiments]'")
    assert not list(tmp_path.glob("*.svg"))


def test_files_among_the_run_folders_of_a_report_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efla.report.page.build", lambda runs, output: [])
    (tmp_path / "README.md").write_text("")
    tyro.cli(report, args=[str(tmp_path / "README.md"), "--output", str(tmp_path / "report.html")])
    assert f"skipped {tmp_path / 'README.md'}" in capsys.readouterr().out


def test_options_replace_the_profiles_grid_and_leave_its_protocol_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFLA_DATA", raising=False)
    chosen = tyro.cli(
        SmnistOptions,
        args=["--arms", "exact-flow", "rk4", "--rates", "1e-3", "--seeds", "0", "1", "--blocks", "residual"],
    )
    config, profile = chosen.config(), SmnistOptions().config()
    cells = SmnistRobustness(config).cells()
    assert cells[0].id == "block=residual arm=exact-flow rate=0.001 seed=0"
    assert len(cells) == 4
    assert SmnistRobustness(config).protocol() == SmnistRobustness(profile).protocol()
    longer = SmnistOptions(steps=7).config()
    assert SmnistRobustness(longer).protocol()["steps"] == 7


@pytest.mark.parametrize("name", ["smnist", "lm", "mad", "throughput"])
def test_arms_are_known_by_the_names_of_their_models(name: str) -> None:
    options = registry.options_class(name)
    chosen = tyro.cli(options, args=["--arms", "efla", "deltanet", "gated-efla", "delta-raw"])
    assert chosen.arms == ("exact-flow", "delta-l2", "gated-exact-flow", "delta-raw")
    assert recipes.get("efla-full") == recipes.get("exact-flow-full")
    assert resolve_model("efla:full", {}).to_dict() == resolve_model("exact-flow:full", {}).to_dict()


def test_the_learning_rate_experiment_asks_for_all_five_rates_of_the_same_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EFLA_DATA", raising=False)
    lr, smnist = (registry.get(name) for name in ("lr", "smnist"))
    assert lr.folder_name() == smnist.folder_name()
    for profile, count in (("quick", 15), ("full", 45)):
        ours = lr(LrOptions(profile=profile).config())  # type: ignore[arg-type]
        theirs = smnist(SmnistOptions(profile=profile).config())  # type: ignore[arg-type]
        assert ours.protocol() == theirs.protocol()
        assert len(ours.cells()) == count
        shared = {cell.id for cell in ours.cells()} & {cell.id for cell in theirs.cells()}
        assert len(shared) == (6 if profile == "quick" else 45)


def test_a_missing_data_folder_stops_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the four MNIST files"):
        _cli("smnist", "--data", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_environment_without_mnist_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFLA_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="EFLA_DATA"):
        choose_source(None, download=False)


def test_an_unknown_experiment_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown experiment 'smnits'.*'smnist'"):
        registry.get("smnits")


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "experiments.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = run_fresh(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["value"] for row in read_rows(tmp_path / "runs" / "square")] == [0, 1, 4]
