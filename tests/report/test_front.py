"""The front page: every claim with its place in the paper, a verdict, and a strip of differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from efla.experiments import registry
from efla.report import front
from efla.report.markdown import markdown
from efla.report.page import build, sections_of
from efla.runs.rows import append_rows
from efla.runs.sections import Section
from efla.runs.statistics import Claim, difference
from tests.experiments.lm.test_lm import made_up as lm_rows
from tests.experiments.throughput.test_throughput import made_up as throughput_rows
from tests.report.pages import numbers_are_finite

pytest.importorskip("jinja2")


def write(folder: Path, experiment: str, rows: list[dict]) -> Path:  # type: ignore[type-arg]
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"format": 1, "experiment": "{experiment}", "protocol": {{}}}}')
    for row in rows:
        append_rows(folder, [row])
    return folder


def section(*claims: Claim, key: str = "lm") -> Section:
    return Section(key=key, title="T", source="s", intro="i", claims=claims)


def test_a_line_takes_the_first_comparisons_verdict_and_counts_the_others() -> None:
    claims = [
        Claim("a", "S", f"pair {i}", v, "n", difference([e, e + 0.1]))
        for i, (v, e) in enumerate((("seen", 2.0), ("reversed", -3.0), ("seen", 1.5)))
    ]
    (line,) = front.front([section(*claims)])
    assert (line.verdict, line.others) == ("seen", "1 reversed, 1 seen")
    assert line.anchor == "#lm-1"
    assert line.place == registry.get("lm").places["a"]
    assert line.strip.count("<circle") == 3


def test_a_strip_puts_what_the_paper_claims_to_the_right_and_the_unjudged_apart() -> None:
    def marks(e: float | None) -> str:
        """A comparison whose interval is e of its half widths away from zero."""
        half = difference([-1.0, 1.0]).detectable
        found = None if e is None else difference([e * half - 1, e * half + 1])
        return front.strip([Claim("a", "S", "<pair>", "seen", "n", found)])

    def x(e: float) -> float:
        (found,) = re.findall(r'cx="([\d.]+)"', marks(e))
        return float(found)

    assert x(-2.0) < x(0.0) < x(1.0) < x(5.0)
    for far in (100.0, -100.0):
        assert "<circle" not in marks(far)
        assert "inf" not in marks(far)
    assert "h5v5h-5Z" in marks(None)
    assert "&lt;pair&gt;" in marks(1.0)


def test_the_picture_has_a_piece_for_every_comparison_in_the_order_of_verdicts() -> None:
    verdicts = ("not judged", "reversed", "seen", "not seen", "seen")
    svg = front.picture([section(*(Claim("a", "S", "<p>", v, "n") for v in verdicts)), section(key="mad")])
    assert re.findall(r'class="mark ([\w-]+)"', svg) == ["seen", "seen", "not-seen", "reversed", "not-judged"]
    assert "T: 2 seen, 1 not seen, 1 reversed, 1 not judged" in svg
    assert "&lt;p&gt;" in svg
    assert front.picture([section()]) == ""


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

    page = (DOCS / "paper.md").read_text()
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
    """Make it again with the command it names: efla report RESULTS --markdown docs/claims.md."""
    page = (DOCS / "claims.md").read_text()
    (folders,) = re.findall(r"`efla report (.*?) --markdown FILE`", page)
    monkeypatch.chdir(DOCS.parent)
    sections = [section for folder in folders.split() for section in sections_of(Path(folder))]
    assert markdown(sections) == page


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
    table = re.findall(r'<table class="front">.*?</table>', page, re.DOTALL)[0]
    assert table.count("<svg") == len(front.front(sections))
    assert "Any verdict on mamba2: run with one seed" in page
    assert "compare only the direction of a difference" in page
    assert "EFLA, 340M, 8B tokens" in page
    assert "0.909" in page, "the ratio of throughputs"
    assert "efla train --recipe efla-1.3b-paper" in page
    numbers_are_finite(page)
