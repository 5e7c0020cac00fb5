"""The sections of the report on evaluations, as data: what a reader sees of small rows, without drawing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from markupsafe import Markup

from efla.evaluation.section import length_figures, length_sections, sections
from efla.runs.chart import Chart, Figure, Point, Series
from efla.runs.sections import Section, Table
from efla.runs.statistics import MISSING
from tests.evaluation.test_items_and_table import cell

Row = dict[str, Any]
STAMP: Row = {
    "versions": {"torch": "2.13"}, "threads": 2, "commit": "abc", "machine": "cpu", "started": "2026-01-02T03:04:05",
    "wall_seconds": 1.25, "config": {"limit": None, "batch_tokens": 64, "text": "novels"},
}  # fmt: skip
SETTINGS = [
    ("limit", MISSING), ("batch tokens", "64"), ("text", "novels"), ("versions", "torch 2.13"), ("threads", "2"),
    ("commit", "abc"), ("machine", "cpu"),
]  # fmt: skip
MODELS = Table(
    "Models",
    ["model", "mixers", "parameters", "vocabulary", "tokens", "length", "digest of the weights"],
    [
        ["<one>", "efla x 2", "1,000", "32,000", "bytes", "2,048", "d1"],
        ["two", "llama", "2,000", "256", "bytes", "0", "d2"],
    ],
)


def about(model: str) -> Row:
    one = {"mixers": "efla x 2", "parameters": 1000, "vocabulary": 32000, "digest": "d1"}
    two = {"mixers": "llama", "parameters": 2000, "vocabulary": 256, "digest": "d2"}
    return {**STAMP, "tokens": "bytes", **(one if model == "<one>" else two)}


def task_rows() -> list[Row]:
    """Two models on PIQA, the first of them also on LAMBADA, on records of two sources."""
    rows = []
    for model, task, metrics in (
        ("<one>", "lambada_openai", {"perplexity": 20.0, "acc": 0.25, "bits_per_byte": 1.5}),
        ("<one>", "piqa", {"acc": 0.75}),
        ("two", "piqa", {"acc": 0.5}),
    ):
        rows.append({**cell(model, task, **metrics), **about(model), "path": "plain", "data": "local files"})
    rows[0] |= {"num_items": 1000, "num_items_in_set": 5153, "data": "Hugging Face hub", "path": "shared prefill"}
    for row in rows[:2]:
        row["max_length"] = 2048
    return [{"row": "other"}, *rows]


def test_the_section_on_the_papers_table():
    (section,) = sections(task_rows(), "folder")
    results, *others = section.tables
    numbers = (  # of the paper, at 340 million and 1.3 billion parameters
        ["105.69", "96.26", "79.97", "72.46", "69.37", "17.29", "16.54"],
        ["20.7", "22.5", "23.9", "25.5", "26.4", "41.8", "43.2"],
        ["61.9", "60.7", "61.0", "62.7", "61.8", "69.2", "68.9"],
    )
    small = ["Mamba-2", "DeltaNet", "EFLA", "Gated DeltaNet", "Gated EFLA"]
    assert results == Table(
        "Zero-shot results",
        [
            "",
            "chance",
            "<one>",
            "two",
            *(f"paper: {m} 340M" for m in small),
            "paper: DeltaNet 1.3B",
            "paper: EFLA 1.3B",
        ],
        [
            ["LMB. ppl", "", "20.00 ± 0.01", MISSING, *numbers[0]],
            ["LMB. acc", "0.0", "25.0 ± 1.0", MISSING, *numbers[1]],
            ["PIQA", "50.0", Markup("<b>75.0 ± 1.0</b>"), "50.0 ± 1.0", *numbers[2]],
            ["LMB. bits/byte", "", "1.500 ± 0.010", MISSING, *[""] * 7],
        ],
    )
    marked = [text for line in results.rows for text in line if isinstance(text, Markup)]
    assert marked == ["<b>75.0 ± 1.0</b>"], "all other text is escaped where it is shown"
    items = [
        ["<one>", "lambada_openai", "1,000 of 5,153", "shared prefill", "1.2 s"],
        ["<one>", "piqa", "10 of 10", "plain", "1.2 s"],
        ["two", "piqa", "10 of 10", "plain", "1.2 s"],
    ]
    assert others == [MODELS, Table("Items and time", ["model", "task", "items", "scored", "time"], items)]
    size, partial, paper, two, left = section.not_concluded
    assert "the largest model here has 2,000 parameters" in size
    assert partial == "Only the first items were scored of: lambada_openai."
    assert paper.startswith("The paper's models were trained on")
    assert two.startswith("That a difference within two standard errors is real")
    assert left == (
        "Anything about columns that were not run: Wiki. ppl, Hella., Wino., ARC-e, ARC-c, BoolQ, OBQA, SciQ, "
        "Wiki. bits/byte, Wiki. ppl, carried, Wiki. bits, carried."
    )
    assert section == Section(
        key="evaluation",
        title="Language models: the paper's table",
        source="folder",
        question="How do these models do on the paper's table?",
        intro=section.intro,
        tables=section.tables,
        settings=SETTINGS,
        data=["lambada_openai, piqa from Hugging Face hub and local files."],
        budget="3 cells, 3.8 s of wall-clock time in total at 2 thread(s) each, 2026-01-02 (UTC).",
        not_concluded=section.not_concluded,
    )


@pytest.mark.parametrize("parameters", [299_999_999, 300_000_000])
def test_one_large_model_needs_fewer_warnings(parameters):
    rows = [{**row, "parameters": parameters} for row in task_rows() if row.get("model") == "two"]
    texts = " ".join(sections(rows, "")[0].not_concluded)
    assert ("the largest model here" in texts) == (parameters < 300e6)
    assert "two standard errors is real" not in texts and "not run" in texts


def length_rows(steps: int | None = 0) -> list[Row]:
    """Bits at three positions and recall of two pairs at two lengths by one model; another has only a cell."""
    rows: list[Row] = []
    for end, bits in ((64, 2.0), (512, 1.5), (1024, 1.0)):
        rows.append(
            {"row": "position", "end": end, "bits_per_byte": bits, "bits_per_token": 4 * bits, "standard_error": 1.0}
        )
    rows[1] |= {"bits_per_byte": 0.0, "bits_per_token": 0.0}
    rows[2]["standard_error"] = math.nan
    if steps is not None:
        for length, share in ((1024, 0.98), (16, 0.5)):
            found = {"among_values": share, "among_values_error": 0.05, "chance": 0.5, "steps": steps}
            rows.append({"row": "recall", "num_pairs": 2, "length": length, **found})
    rows = [{**row, "model": "<one>"} for row in rows]
    for model in ("<one>", "two"):
        rows.append({"row": "cell", "model": model, **about(model), "trained_length": 2048 if model == "<one>" else 0})
    return rows


def test_the_figures_of_long_contexts():
    def chart(title: str, x: str, series: list[Series], ticks: list[float]) -> Chart:
        label = "recall among the values, %"
        return Chart(title, x, label, series, (0, 102), log_x=True, x_ticks=ticks)

    def recalled(*points: Point) -> list[Series]:
        chance = Series("chance", "chance", [Point(p.x, 50.0, text="50.0 %") for p in points])
        return [Series("efla", "<one>", list(points)), Series("implicit_euler", "two", []), chance]

    position, by_pairs, by_length = length_figures(length_rows())
    points = [
        Point(64.0, 2.0, 1.75, 2.25, "2.000 ± 0.250"),
        Point(512.0, 0.0, -1.0, 1.0, "0.000 ± 1.000"),
        Point(1024.0, 1.0, 1.0, 1.0, "1.000 ± nan"),
    ]
    whole, late = ([Series("efla", "<one>", points[first:]), Series("implicit_euler", "two", [])] for first in (0, 1))
    labels = ("position", "bits per byte")
    assert position == Figure(
        "bits_by_position",
        "Loss by position, state carried",
        "Mean over stretches of the text; the band is one standard error.",
        [
            Chart("All positions", *labels, whole, (-1.1625, 2.4125), log_x=True, x_ticks=[64, 512, 1024]),
            Chart("From position 257 on", *labels, late, (-1.1, 1.1), log_x=True, x_ticks=[512, 1024]),
        ],
    )
    short, long = Point(16.0, 50.0, 45.0, 55.0, "50.0 ± 5.0 %"), Point(1024.0, 98.0, 93.0, 100.0, "98.0 ± 5.0 %")
    charts = [
        chart("16 tokens", "pairs", recalled(Point(2.0, *list(vars(short).values())[1:])), [2]),
        chart("1,024 tokens", "pairs", recalled(Point(2.0, *list(vars(long).values())[1:])), [2]),
    ]
    note = (
        "Right answers among the values of the sequence; chance is one over the pairs. The band is one standard error."
    )
    assert by_pairs == Figure("recall_by_pairs", "Associative recall against pairs", note, charts)
    charts = [chart("2 pairs", "length", recalled(short, long), [16, 1024])]
    assert by_length == Figure("recall_by_length", "Associative recall against length", note, charts)


def test_late_positions_have_a_chart_if_they_make_a_curve():
    def charts(*ends: int) -> list[str]:
        rows = [{**row, "end": end} for row, end in zip(length_rows(), ends, strict=False)]
        return [chart.title for chart in length_figures([*rows, *length_rows()[-2:]])[0].charts]

    assert charts(64, 256, 257) == ["All positions"]
    assert charts(64, 257, 512) == ["All positions", "From position 257 on"]


def test_a_chart_of_nothing_finite_has_an_axis():
    rows = [{**row, "bits_per_byte": math.nan} if row["row"] == "position" else row for row in length_rows(None)]
    (figure,) = length_figures(rows)
    assert {chart.y_range for chart in figure.charts} == {(-0.05, 1.05)}


@pytest.mark.parametrize("steps", [0, 3, None])
def test_the_section_on_long_contexts(steps):
    rows = length_rows(steps)
    (section,) = length_sections(rows, "folder")
    assert section.intro.endswith("pairs (MQAR), after 3 steps of training on recall." if steps else "pairs (MQAR).")
    trained, mixers, *others = section.not_concluded
    assert trained.startswith("Anything about a trained length") and mixers.startswith("That a difference between two")
    assert [text[:35] for text in others] == (["What an architecture could recall: "] if steps == 0 else [])
    assert section == Section(
        key="length",
        title="Language models: long contexts",
        source="folder",
        question="How well do these models use long contexts?",
        intro=section.intro,
        figures=length_figures(rows),
        tables=[MODELS],
        settings=SETTINGS,
        data=["Text: novels."],
        budget="2 cells, 2.5 s of wall-clock time in total at 2 thread(s) each, 2026-01-02 (UTC).",
        not_concluded=section.not_concluded,
    )
