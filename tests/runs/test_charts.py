"""Charts as a reader sees them: values read off the axes, and text that stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from efla.report.page import build
from efla.runs.bars import Bars, BarSeries, draw
from efla.runs.chart import Chart, Point, Series
from efla.runs.rows import append_rows
from tests.report.pages import Markup, charts_of, read_chart
from tests.report.test_report import write_run

pytest.importorskip("jinja2")

HOSTILE = """<x-injected a="1">&amp;'"</x-injected>"""


def chart(log_x: bool, log_y: bool) -> Chart:
    """Points at 1, 10, 100 and 1000 with uneven bands."""
    points = [Point(x, 2 * x, 1.2 * x, 3 * x, str(x)) for x in (1, 10, 100, 1000)]
    return Chart("t", "x", "y", [Series("efla", "EFLA", points)], (1, 4000), log_x=log_x, log_y=log_y)


@pytest.mark.parametrize("log_x", [False, True], ids=["linear x", "log x"])
@pytest.mark.parametrize("log_y", [False, True], ids=["linear y", "log y"])
def test_values_and_bands_stand_where_the_axes_say(log_x: bool, log_y: bool) -> None:
    drawn = read_chart(draw(chart(log_x, log_y)))
    assert (drawn.x.is_log, drawn.y.is_log) == (log_x, log_y)
    (curve,), (band,) = drawn.curves, drawn.bands
    near = {"rel": 3e-3, "abs": 0 if log_x else 0.5}  # coordinates have one decimal: ends are off by 1/20 of a pixel
    assert [x for x, _ in curve] == pytest.approx([1, 10, 100, 1000], **near)
    assert [x for x, _, _ in band] == pytest.approx([1, 10, 100, 1000], **near)
    near = {"rel": 3e-3, "abs": 0 if log_y else 2}
    assert [y for _, y in curve] == pytest.approx([2, 20, 200, 2000], **near)
    assert [low for _, low, _ in band] == pytest.approx([1.2, 12, 120, 1200], **near)
    assert [high for _, _, high in band] == pytest.approx([3, 30, 300, 3000], **near)


def test_the_report_draws_one_standard_deviation_on_either_side_and_factors_on_a_log_axis(tmp_path: Path) -> None:
    """The made-up accuracies of three seeds are 0.01 apart: their deviation is one point."""
    build([write_run(tmp_path / "run")], tmp_path / "report.html")
    found = charts_of((tmp_path / "report.html").read_text())
    banded = [chart for chart in found if chart.bands]
    assert len(banded) == 3, "dropout, scale and noise"
    for chart in banded:
        for curve, band in zip(chart.curves, chart.bands, strict=True):
            for (_, y), (_, low, high) in zip(curve, band, strict=True):
                assert (y - low, high - y) == pytest.approx((1, 1), abs=0.06)
        loss_of_accuracy = [(x, 91 - y) for curve in chart.curves for x, y in curve]
        assert all(lost == pytest.approx(2 * x, abs=0.2) or lost == pytest.approx(4 * x, abs=0.4)
                   for x, lost in loss_of_accuracy)  # fmt: skip
    log = [chart.labels[0] for chart in found if len(chart.x.ticks) > 2 and chart.x.is_log]
    assert sorted(log) == ["intensity multiplied by", "learning rate", "learning rate"]


PLACES = ("title", "x_label", "y_label", "label", "text")


def line_chart(**texts: str) -> Chart:
    points = [Point(float(x), 1.0, 0.0, 2.0, texts.pop("text", "1") if x else "1") for x in range(2)]
    series = [Series("efla", texts.pop("label", "EFLA"), points)]
    return Chart(**{"title": "t", "x_label": "x", "y_label": "y", **texts}, series=series, y_range=(0, 3))


def bar_chart(groups: int, **texts: str) -> Bars:
    names = [texts.pop("group", "g"), *"abcdefg"[: groups - 1]]
    points = [Point(0.0, 50.0, 40.0, 60.0, texts.pop("text", "1")), *[None] * (groups - 1)]
    series = [BarSeries("efla", texts.pop("label", "EFLA"), points)]
    return Bars(**{"title": "t", "x_label": "x", "y_label": "y", **texts}, groups=names, series=series)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("lines", place) for place in PLACES]
    + [(kind, place) for kind in ("few bars", "many bars") for place in (*PLACES, "group")],
)
def test_text_in_a_chart_stays_text(kind: str, place: str) -> None:
    texts = {place: HOSTILE}
    svg = draw(line_chart(**texts) if kind == "lines" else bar_chart(3 if kind == "few bars" else 6, **texts))
    seen = Markup(svg)
    assert "x-injected" not in seen.tags
    assert not [name for name, _ in seen.attributes if name == "a"]
    attributes = dict(seen.attributes)
    hover = json.loads(attributes["data-values"])
    in_hover = HOSTILE in json.dumps(hover, ensure_ascii=False).replace('\\"', '"')
    assert in_hover == (place in ("x_label", "label", "text", "group"))
    assert (HOSTILE in attributes["aria-label"]) == (place in ("title", "x_label", "y_label", "label"))
    hidden = kind == "many bars" and place == "x_label"  # the names of the groups say it
    assert (HOSTILE in seen.text) == (place in ("x_label", "y_label", "group") and not hidden)


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
    seen = Markup((tmp_path / "report.html").read_text())
    assert "x-injected" not in seen.tags
    assert not [name for name, _ in seen.attributes if name == "a"]
    described = [value for name, value in seen.attributes if name == "aria-label" and "curves" in value]
    assert len(described) >= 3
    assert all(HOSTILE in value for value in described)
    assert seen.text.count(HOSTILE) >= 4, "legends, the table of models and the settings show the name as it is"
