"""The first screen: the answer, the key figure, and every claim with its place in the paper and a verdict."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from efla.experiments import registry
from efla.report import front
from efla.report.page import build, claims_page, sections_of
from efla.runs import vega
from efla.runs.chart import Chart, Figure, Point, Series
from efla.runs.rows import append_rows
from efla.runs.sections import Section
from efla.runs.statistics import Claim, difference
from tests.experiments.lm.test_lm import made_up as lm_rows
from tests.experiments.throughput.test_throughput import made_up as throughput_rows
from tests.report.pages import charts_of, rows_of

for package in ("jinja2", "altair", "vl_convert"):
    pytest.importorskip(package)


def write(folder: Path, experiment: str, rows: list[dict]) -> Path:  # type: ignore[type-arg]
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"format": 1, "experiment": "{experiment}", "protocol": {{}}}}')
    for row in rows:
        append_rows(folder, [row])
    return folder


def section(*claims: Claim, key: str = "lm", **more: Any) -> Section:
    return Section(key=key, title="T", source="s", question="q", intro="i", claims=claims, **more)


def claim(verdict: str, *values: float, unit: str = "points", letter: str = "a", **more: Any) -> Claim:
    found = difference(values) if values else None
    return Claim(letter, "S", "pair", verdict, "reason", found, unit, **more)


def test_a_line_takes_the_first_comparisons_verdict_and_counts_the_others() -> None:
    (line,) = front.claim_lines([section(claim("seen"), claim("reversed"), claim("seen"))])
    assert (line.claim.verdict, line.others) == ("seen", "1 reversed, 1 seen")
    assert line.anchor == "#lm-1"
    assert line.place == registry.get("lm").places["a"]


def test_the_answer_counts_verdicts_and_one_seed_gives_what_was_measured() -> None:
    lines = front.claim_lines(
        [section(claim("seen", 1, 2, 3), claim("not seen", letter="b"), claim("seen", letter="c"))]
    )
    assert front.answer(lines).startswith(
        "Of 3 claims of the paper tested here, 2 are seen and 1 is not seen. “S”: seen (+2.0 points ["
    )
    single = front.claim_lines([section(claim("not judged", 2.0))])
    assert front.answer(single) == "Measured: pair, +2.0 points, n = 1; reason. One seed gives no verdict."
    assert front.findings(section(claim("not judged", 2.0))) == [("", "S (pair): +2.0 points, n = 1; reason.")]
    assert front.answer([]) == ""


def test_the_key_figure_is_corruption_and_has_at_most_three_charts() -> None:
    def figure(name: str, count: int) -> Figure:
        return Figure(name, name, "", [Chart("t", "x", "y", [Series("efla", "EFLA", [Point(0.0, 1.0)])])] * count)

    first, corruption = section(figures=[figure("a", 2)]), section(key="smnist", figures=[figure("b", 4)])
    found = front.headline([first, corruption])
    assert found is not None
    assert (found.name, len(found.charts)) == ("b", 3)
    assert front.headline([section()]) is None


def test_a_forest_plot_has_the_interval_the_zero_line_and_the_papers_value_of_one_unit() -> None:
    claims = [
        claim("seen", 1.9, 2, 2.1, paper=0.7),
        claim("seen", 1, 1.01, unit="bits", letter="b"),
        claim("not judged", 1.0, letter="c"),
    ]
    found = front.by_unit(front.claim_lines([section(*claims)]))
    assert {unit: len(each) for unit, each in found.items()} == {"points": 1, "bits": 1}
    spec = vega.forest_spec(found["points"], "points")
    (row,) = rows_of(spec, "circle")
    assert (row["mean"], row["paper"], row["verdict"]) == (pytest.approx(2.0), 0.7, "seen")
    assert (row["low"], row["high"]) == pytest.approx((2 - 0.4302653 / math.sqrt(3), 2 + 0.4302653 / math.sqrt(3)))
    assert rows_of(spec, "rule") == [{"zero": 0}]
    assert "S (pair): seen" in spec["description"]


def test_every_experiment_that_judges_claims_has_places_and_a_sentence_for_when_it_was_not_run() -> None:
    assert all(registry.get(name).places and registry.get(name).claim for name in registry.names())
    assert [command for _, command in front.not_run([section(key="mad")])] == [
        f"efla reproduce {name}" for name in registry.names() if name != "mad"
    ]


def test_what_the_papers_scale_costs_comes_from_the_recipes_and_our_accounting() -> None:
    costs = front.unreachable()
    assert len(costs) == len(front.UNREACHABLE)
    small, _, large = (float(re.findall(r"about ([\d,]+) A100", cost)[0].replace(",", "")) for _, _, cost in costs)
    # 6 operations per parameter and token is the floor; 312 TFLOP/s at 40 %.
    assert small > 6 * 308.8e6 * 8e9 / (0.4 * 312e12) / 3600
    assert 10 < large / small < 40


DOCS = Path(__file__).parents[2] / "docs"


def test_the_costs_on_the_papers_page_are_those_of_the_recipes() -> None:
    from efla.train import recipes
    from efla.train.estimate import Machines, estimate

    page = (DOCS / "results" / "paper.md").read_text()
    names = {
        "EFLA or DeltaNet, 340M": ("efla-340m", "deltanet-340m"),
        "Gated EFLA or Gated DeltaNet, 340M": ("gated-efla-340m", "gated-deltanet-340m"),
        "Mamba-2, 340M": ("mamba2-340m",),
        "EFLA or DeltaNet, 1.3B": ("efla-1.3b", "deltanet-1.3b"),
    }
    for title, models in names.items():
        cells = next(line for line in page.splitlines() if line.startswith(f"| {title} |")).split("|")[2:-1]
        for model in models:
            found = estimate(recipes.get(f"{model}-paper"), Machines("a100", 8))
            hours = found["estimated_hours"]
            expected = [
                f"{found['tokens'] / 1e9:.1f} billion",
                f"{found['training_flops']:.2e}".replace("e+", "e"),
                f"{8 * hours:.0f}",
                f"{hours:.0f} h" if hours > 10 else f"{hours:.1f} h",
            ]
            assert [cell.strip() for cell in cells] == expected, model


def test_the_page_of_claims_is_what_its_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it again with the command it names: efla report RESULTS --markdown docs/results/claims.md."""
    page = (DOCS / "results" / "claims.md").read_text()
    (folders,) = re.findall(r"`efla report (.*?) --markdown FILE`", page)
    monkeypatch.chdir(DOCS.parent)
    sections = [section for folder in folders.split() for section in sections_of(Path(folder))]
    assert claims_page(sections) == page


def test_the_page_has_language_models_throughput_and_the_front_table(tmp_path: Path) -> None:
    rows = lm_rows({"exact-flow": [2.0, 2.01, 2.02], "delta-l2": [2.1, 2.11, 2.12], "mamba2": [2.2]})
    rows[0]["keys"] = {
        "quantiles": [0.5, 0.99, 1.0],
        "layers": [{"layer": 0, "lam": [1, 2, 3], "step_size": [0.1, 1, 2]}],
    }
    rows[1]["failed"] = True
    for row in rows:
        row["positions"] = {"ends": [64, 128], "bits": [2.5, 2.2], "standard_errors": [0.1, 0.1], "rows": 2}
    timings = throughput_rows({"delta-l2": [1.0] * 5, "exact-flow": [1.1] * 5})
    folders = [write(tmp_path / "lm", "lm", rows), write(tmp_path / "t", "throughput", timings)]
    sections = build(folders, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert [s.key for s in sections] == ["lm", "throughput"]
    table = re.findall(r'<table class="claims">.*?</table>', page, re.DOTALL)[0]
    assert table.count('scope="row"') == len(front.claim_lines(sections))
    assert "Any verdict on Mamba-2: run with one seed" in page
    assert "compare only the direction of a difference" in page
    assert "EFLA, 340M, 8B tokens" in page
    assert "0.909" in page, "the ratio of throughputs"
    assert "efla train --recipe efla-1.3b-paper" in page
    (bits, *_) = (chart for chart in charts_of(page) if chart["title"]["text"] == "Test text, every run")
    assert [row["x"] for row in rows_of(bits, "tick")] == ["DeltaNet", "EFLA", "Mamba-2"]
    assert len(rows_of(bits, "circle")) == 6, "a dot a run, without the one that failed"
