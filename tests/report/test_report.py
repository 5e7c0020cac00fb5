"""The report: one file, from rows alone, without a network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from efla.report.page import build
from efla.runs.rows import ROWS, append_rows
from tests.experiments.smnist.test_claims import made_up_rows
from tests.report.pages import charts_of, encoding, rows_of

for package in ("jinja2", "altair", "vl_convert"):
    pytest.importorskip(package)


def write_run(folder: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    """A run folder of sequential MNIST with made-up numbers, written by append_rows."""

    def accuracy(arm: str, kind: str, level: float, seed: int) -> float:
        return 0.9 + 0.01 * seed - (0.02 if arm == "exact-flow" else 0.04) * level

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"format": 1, "experiment": "smnist", "protocol": {}}))
    pending = []
    for row in made_up_rows(
        accuracy, loss=lambda arm, rate, seed: float("nan") if arm == "delta-raw" and seed == 1 else 0.3, seeds=seeds
    ):
        pending.append(row)
        if row["row"] == "cell":
            append_rows(folder, pending)
            pending = []
    return folder


class _Checker(HTMLParser):
    """Collects what the page refers to, and checks that elements are closed in order."""

    void = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


@pytest.fixture
def page(tmp_path: Path) -> str:
    build([write_run(tmp_path / "run")], tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.references
    assert all(reference.startswith("#") or reference == "data:," for reference in checker.references)
    assert len(checker.ids) == len(set(checker.ids))
    assert set(checker.references) - {"data:,"} <= {f"#{identifier}" for identifier in checker.ids}
    assert not re.search(r"https?://|@import|url\(", page)


def test_the_first_screen_has_the_answer_and_the_key_figure_before_any_table(page: str) -> None:
    places = [page.index(text) for text in ('class="answer"', 'class="legend"', 'data-spec="0"', "<table")]
    assert places == sorted(places)
    assert [chart["title"]["text"] for chart in charts_of(page)[:3]] == ["Scale", "Noise", "Dropout"]


def test_the_page_states_every_claim_with_a_verdict_numbers_data_and_limits(page: str) -> None:
    for letter in "abcde":
        assert f"<h3>({letter})" in page
    assert page.count('class="badge seen"') >= 1
    assert len(re.findall(r"<td[^>]*>[^<]*± \d", page)) > 10, "tables have spreads"
    assert "Small differences: the spread is estimated from 3 seeds." in page
    assert "made-up &lt;images&gt;" in page, "text from rows is escaped"
    assert "made-up <images>" not in page
    assert "45 cells" in page
    assert "1 of 3" in page, "diverged runs are counted"


def test_the_page_calls_models_by_their_names_and_folders_without_their_place(page: str, tmp_path: Path) -> None:
    for name in ("EFLA", "DeltaNet", "DeltaNet (raw keys)"):
        assert f'data-series="{name}' in page
    assert not re.search(r'<th scope="row">[^<]*(exact-flow|delta-raw|delta-l2)', page)
    assert str(tmp_path) not in page


def test_one_seed_leads_with_what_was_measured_and_says_once_that_it_gives_no_verdict(tmp_path: Path) -> None:
    build([write_run(tmp_path / "one", seeds=(0,))], tmp_path / "one.html")
    page = (tmp_path / "one.html").read_text()
    (answer,) = re.findall(r'<p class="answer">(.*?)</p>', page)
    assert answer.startswith("Measured: ")
    assert page.count("One seed gives no verdict") == 1
    assert 'class="badge' not in page


def test_figures_have_a_band_for_several_seeds_and_none_for_one(tmp_path: Path, page: str) -> None:
    def bands(charts: list[dict]) -> int:  # type: ignore[type-arg]
        return sum(
            any(row["low"] is not None and row["low"] < row["high"] for row in rows_of(chart, "area"))
            for chart in charts
        )

    assert bands(charts_of(page)) == 3 + 3, "the key figure, and the same below"
    build([write_run(tmp_path / "one", seeds=(0,))], tmp_path / "one.html")
    single = charts_of((tmp_path / "one.html").read_text())
    assert bands(single) == 0
    assert len(single) == len(charts_of(page)) == 3 + 4 + 2 + 5


def test_a_diverged_model_is_named_and_its_seeds_stand_for_the_band(page: str) -> None:
    diverged = "DeltaNet (raw keys), 1 of 3 runs diverged"
    assert f'data-series="{diverged}"' in page
    scale = charts_of(page)[0]
    assert all(row["low"] is None for row in rows_of(scale, "area") if row["series"] == diverged)
    seeds = [scale["datasets"][layer["data"]["name"]] for layer in scale["layer"] if layer["mark"]["type"] == "circle"][
        1
    ]
    assert len([row for row in seeds if row["series"] == diverged and row["x"] == 1]) == 3
    (loss,) = (chart for chart in charts_of(page) if chart["title"]["text"].startswith("Final training loss"))
    assert rows_of(loss, "point"), "crosses"


def test_every_chart_has_a_description_a_legend_that_hides_and_a_table(page: str) -> None:
    charts = charts_of(page)
    assert page.count("<summary>Values as tables</summary>") == page.count('class="legend"') == 4
    for chart in charts:
        assert "The table below has the values." in chart["description"]
        assert chart["params"][0] == {"name": "hidden", "value": []}
        for layer in chart["layer"]:
            rows = chart["datasets"][layer["data"]["name"]]
            assert "series" not in rows[0] or layer["transform"] == [{"filter": "indexof(hidden, datum.series) < 0"}]
    assert {row["series"] for row in rows_of(charts[0], "line")} == set(
        encoding(charts[0], "line", "color")["scale"]["domain"]
    )


def test_the_same_folder_twice_is_one_section_and_two_folders_are_not_pooled(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    assert len(build([first, first], tmp_path / "report.html")) == 2
    assert [s.source for s in build([first, second], tmp_path / "report.html")] == ["first"] * 2 + ["second"] * 2


def test_half_written_rows_are_left_out(tmp_path: Path, page: str) -> None:
    folder = write_run(tmp_path / "again")
    with open(folder / ROWS, "ab") as file:
        file.write(b'{"row": "level", "cell": "exact-flow 0.0')
    build([folder], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text().replace("<code>again</code>", "<code>run</code>") == page


def test_bad_folders_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the output folder of `efla reproduce`"):
        build([tmp_path], tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one run folder"):
        build([], tmp_path / "report.html")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps({"format": 1, "experiment": "smnist", "protocol": {}}))
    (empty / ROWS).write_text("")
    with pytest.raises(ValueError, match="no finished cell yet"):
        build([empty], tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write the report"):
        build([write_run(tmp_path / "run")], tmp_path / "file" / "report.html")
    assert not (tmp_path / "report.html").exists()
