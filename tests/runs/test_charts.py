"""Charts as a reader sees them: values where the axes say, bands within their range, and text that stays text."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from efla.report.page import build
from efla.runs import vega
from efla.runs.chart import Chart, Figure, Guide, Point, Series, over_seeds, tidy, values_table
from efla.runs.rows import append_rows
from efla.runs.statistics import spread
from tests.report.pages import Markup, charts_of, encoding, labels_of, rows_of, specs_of
from tests.report.test_report import write_run

for package in ("jinja2", "altair", "vl_convert"):
    pytest.importorskip(package)

HOSTILE = """<x-injected a="1">&amp;'"</x-injected>"""


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vega, "library", lambda: "/* vega */")


def figure(*charts: Chart) -> Figure:
    return Figure("name", "title", "note", charts)


@pytest.mark.parametrize("log_x", [False, True], ids=["linear x", "log x"])
@pytest.mark.parametrize("log_y", [False, True], ids=["linear y", "log y"])
def test_values_stand_where_the_axes_say(tmp_path: Path, log_x: bool, log_y: bool) -> None:
    points = [Point(float(x), 2.0 * x) for x in (1, 10, 100, 1000)]
    chart = Chart("t", "x", "y", [Series("efla", "EFLA", points)], (1, 4000), log_x=log_x, log_y=log_y)
    (svg, _) = vega.save(figure(chart), tmp_path, ["svg"])
    (path,) = re.findall(r'aria-roledescription="line mark"[^>]* d="(M[^"]*)"', svg.read_text())
    drawn = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path) if pair]
    assert len(drawn) == 4
    for axis, log in ((0, log_x), (1, log_y)):
        steps = [abs(b[axis] - a[axis]) for a, b in pairwise(drawn)]
        expected = [1, 1, 1] if log else [1, 10, 100]
        assert [step / steps[0] for step in steps] == pytest.approx(expected, rel=1e-2)


def test_the_report_draws_one_standard_deviation_on_either_side_and_factors_on_a_log_axis(tmp_path: Path) -> None:
    """The made-up accuracies of three seeds are 0.01 apart: their deviation is one point."""
    build([write_run(tmp_path / "run")], tmp_path / "report.html")
    found = charts_of((tmp_path / "report.html").read_text())
    for chart in found[:3]:
        rows = rows_of(chart, "line")
        for row in rows:
            if row["low"] is not None:
                assert (row["y"] - row["low"], row["high"] - row["y"]) == pytest.approx((1, 1))
            assert 91 - row["y"] == pytest.approx((2 if row["series"] == "EFLA" else 4) * row["x"])
    log = [labels_of(chart)[1] for chart in found if encoding(chart, "line", "x")["scale"]["type"] == "log"]
    assert sorted(log) == ["intensity multiplied by"] * 2 + ["learning rate"] * 2


def test_bands_of_percentages_end_at_0_and_100() -> None:
    series = over_seeds("efla", ([1, 2], [spread([0.8, 1.0, 1.0]), spread([0.0, 0.0, 0.1])]), 100)
    assert (series.points[0].high, series.points[1].low) == (100, 0)
    losses = over_seeds("efla", ([1], [spread([0.0, 0.1])]))
    assert losses.points[0].low < 0, "a loss has no such end"


def test_values_that_are_not_finite_leave_a_gap_and_a_model_without_any_is_named() -> None:
    points = [Point(float(x), math.nan if x == 2 else 1.0) for x in range(4)]
    gone = Series("delta", "DeltaNet", [Point(0.0, math.nan)])
    chart = Chart("t", "x", "y", [Series("efla", "EFLA", points), gone], guides=[Guide("y", 2.0, "dashed: two")])
    spec = vega.page_spec(chart, figure(chart).legend)
    assert [row["y"] for row in rows_of(spec, "line")] == [1.0, 1.0, None, 1.0, None]
    assert spec["title"]["subtitle"] == ["dashed: two", "diverged: DeltaNet"]
    assert json.loads(json.dumps(spec, allow_nan=False)) == spec


def test_hovering_shows_every_series_at_an_x_and_the_table_has_the_same(tmp_path: Path) -> None:
    chart = Chart(
        "t",
        "size",
        "y",
        [Series(k, k.upper(), [Point(1.0, 5.0, text=f"{k} 5"), Point(2.0, 6.0)]) for k in ("efla", "delta")],
    )
    spec = vega.page_spec(chart, chart.series)
    hover = spec["layer"][-1]
    assert [field["title"] for field in hover["encoding"]["tooltip"]] == ["size", "EFLA", "DELTA"]
    assert spec["datasets"][hover["data"]["name"]][0] == {"x": 1.0, "at": "1", "s0": "efla 5", "s1": "delta 5"}
    assert values_table(chart) == (["size", "EFLA", "DELTA"], [["1", "efla 5", "delta 5"], ["2", "6", "6"]])
    long = Chart("t", "x", "y", [Series("efla", "EFLA", [Point(float(x), 1.0) for x in range(100)])])
    assert 20 < len(values_table(long)[1]) < 30
    assert values_table(long)[1][-1][0] == "99"


def test_a_figure_is_saved_light_and_dark_as_svg_png_and_pdf(tmp_path: Path) -> None:
    chart = Chart("t", "x", "y", [Series("efla", "EFLA", [Point(0.0, 1.0), Point(1.0, 2.0)])])
    files = vega.save(figure(chart), tmp_path, vega.FORMATS)
    assert [file.name for file in files] == ["name.svg", "name-dark.svg", "name.png", "name.pdf"]
    light, dark = files[0].read_text(), files[1].read_text()
    assert "#0b4f8a" in light and "#0b4f8a" not in dark
    assert "var(--" not in light + dark
    assert files[2].read_bytes().startswith(b"\x89PNG") and files[3].read_bytes().startswith(b"%PDF")
    assert vega.save(figure(chart), tmp_path, ["svg"])[0].read_text() == light, "the same values give the same file"
    assert vega.save_all([figure()], tmp_path) == []


def test_without_the_packages_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vega, "find_spec", lambda name: None)
    assert vega.unavailable() == "charts need altair and vl_convert: pip install 'efla[experiments]'"
    with pytest.raises(RuntimeError, match=r"pip install 'efla\[experiments\]'"):
        vega.save(figure(), tmp_path)


PLACES = ("title", "x_label", "y_label", "label", "text", "group")


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, place) for kind in ("curves", "bars", "dots") for place in PLACES[: 5 + (kind != "curves")]],
)
def test_text_in_a_chart_stays_text(kind: Any, place: str, tmp_path: Path) -> None:
    texts = dict.fromkeys(PLACES, "plain") | {place: HOSTILE}
    x: Any = 0.0 if kind == "curves" else texts["group"]
    series = [Series("efla", texts["label"], [Point(x, 50.0, 40.0, 60.0, texts["text"], seeds=[50.0])])]
    chart = Chart(texts["title"], texts["x_label"], texts["y_label"], series, (0, 100), kind=kind)
    assert HOSTILE in json.loads(json.dumps(vega.page_spec(chart, series)))["description"] or place in ("text", "group")
    (svg, _) = vega.save(figure(chart), tmp_path, ["svg"])
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg.read_text()).iter()}
    assert "x-injected" not in tags


def test_a_models_name_cannot_put_markup_into_the_report(tmp_path: Path) -> None:
    """Through charts, legends, tables, and what hovering shows."""
    about = {"cell": "a", "model": HOSTILE}
    rows: list[dict[str, Any]] = [
        {**about, "row": "position", "end": end, "bits_per_byte": 2.0, "bits_per_token": 2.0, "standard_error": 0.1}
        for end in (64, 512, 1024)
    ]
    rows += [
        {**about, "row": "recall", "num_pairs": pairs, "length": 64, "among_values": 0.5, "among_values_error": 0.1,
         "chance": 0.1, "steps": 0}
        for pairs in (2, 4, 8)
    ]  # fmt: skip
    rows.append(
        {**about, "row": "cell", "mixers": "efla", "parameters": 10, "vocabulary": 256, "tokens": "bytes", "digest": "0",
         "wall_seconds": 1.0, "threads": 1, "started": "2026-01-01T00:00:00", "versions": {}, "commit": None, "machine": {},
         "config": {"text": HOSTILE}}
    )  # fmt: skip
    (tmp_path / "config.json").write_text('{"format": 1, "experiment": "evaluation-length", "protocol": {}}')
    append_rows(tmp_path, rows)
    build([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen = Markup(page)
    assert "x-injected" not in seen.tags
    assert not [name for name, _ in seen.attributes if name == "a"]
    assert seen.text.count(HOSTILE) >= 4, "legends, the table of models and the settings show the name as it is"
    assert all(HOSTILE in spec["description"] for spec in specs_of(page))


def test_numbers_are_short() -> None:
    assert [tidy(value) for value in (0, 0.25, 1234.5678, 1e-4, 3e38)] == ["0", "0.25", "1235", "1e-4", "3e38"]
