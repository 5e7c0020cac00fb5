"""What a user of ``efla eval`` sees, character by character: tables, comparisons, curves, and lines as work goes on."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from efla.evaluation.items import (
    MEAN,
    Difference,
    compare_models,
    comparison_lines,
    file_name,
    items_path,
    read_items,
    write_items,
)
from efla.evaluation.long_context import show_length
from efla.evaluation.run import EvaluationSettings, TaskEvaluation
from efla.evaluation.section import length_figures, line_keys
from efla.evaluation.table import (
    ACCURACIES,
    CARRIED,
    COLUMNS,
    EXTRA_COLUMNS,
    Column,
    markdown,
    result_table,
    terminal,
)
from efla.runs.chart import Chart
from efla.runs.names import LOOKS
from tests.evaluation.test_items_and_table import cell

Row = dict[str, Any]


def table_rows() -> list[Row]:
    """Two models on the ten tasks, one of them on a task of its own, the other with its state carried."""
    rows = []
    for model, accuracy in (("one", 0.3), ("two", 0.41)):
        for task in dict.fromkeys(column.task for column in COLUMNS):
            metrics = {c.metric: accuracy if c.is_accuracy else 20 + 10 * accuracy for c in COLUMNS if c.task == task}
            if task in ("wikitext", "lambada_openai"):
                metrics["bits_per_byte"] = 1.25 + accuracy
            rows.append(cell(model, task, **metrics))
    rows[0]["num_items_in_set"] = 62
    rows.append(cell("one", "gsm8k", exact_match=0.25))
    rows.append(cell("two", CARRIED, word_perplexity=1234567.0, bits_per_byte=math.nan))
    rows[-1]["standard_errors"]["bits_per_byte"] = math.nan
    return rows


TABLE = """\
|  | chance | one | two | paper: DeltaNet 1.3B | paper: EFLA 1.3B |
| --- | ---: | ---: | ---: | ---: | ---: |
| Wiki. ppl |  | **23.00 ± 0.01** | 24.10 ± 0.01 | 18.38 | 18.30 |
| LMB. ppl |  | **23.00 ± 0.01** | 24.10 ± 0.01 | 17.29 | 16.54 |
| LMB. acc | 0.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 41.8 | 43.2 |
| PIQA | 50.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 69.2 | 68.9 |
| Hella. | 25.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 44.5 | 44.5 |
| Wino. | 50.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 49.3 | 52.1 |
| ARC-e | 25.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 52.5 | 54.4 |
| ARC-c | 25.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 26.4 | 26.4 |
| BoolQ | 62.2 | 30.0 ± 1.0 | **41.0 ± 1.0** | 58.1 | 60.4 |
| OBQA | 25.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 29.8 | 31.6 |
| SciQ | 25.0 | 30.0 ± 1.0 | **41.0 ± 1.0** | 82.6 | 84.2 |
| mean of the 9 | 31.9 | 30.00 ± 0.33 | **41.00 ± 0.33** | 50.47 | 51.74 |
| average as printed |  |  |  | 50.5 | 51.8 |
| Wiki. bits/byte |  | **1.550 ± 0.010** | 1.660 ± 0.010 |  |  |
| Wiki. ppl, carried |  | – | 1.23e+06 ± 0.01 |  |  |
| Wiki. bits, carried |  | – | not finite |  |  |
| LMB. bits/byte |  | **1.550 ± 0.010** | 1.660 ± 0.010 |  |  |
| gsm8k exact_match |  | 0.25 ± 0.01 | – |  |  |

± is one standard error over the items of a set, not over seeds.
Only the first items were scored of: wikitext.
The paper's models were trained on 8B (340M) and 50B (1.3B) tokens of SlimPajama: compare sizes and data before numbers. \
The mean is recomputed; DeltaNet 340M is printed as 42.2 but its row's mean is 43.11."""  # noqa: RUF001


def test_the_whole_table_as_it_is_written():
    assert markdown(result_table(table_rows(), "1.3B")) == TABLE


def test_the_lowest_perplexity_of_any_task_is_the_best():
    rows = [
        cell("one", "lambada_standard", acc=0.4, perplexity=9.0),
        cell("two", "lambada_standard", acc=0.5, perplexity=8.0),
    ]
    lines = {line[0].text: line for line in result_table(rows, "none").lines}
    assert [line[3].is_best for line in lines.values()] == [True, True], "two is better in both"


def test_the_table_on_a_terminal_has_the_same_cells():
    table = result_table(table_rows(), "1.3B")
    shown = terminal(table)
    assert shown.caption == "\n".join(table.notes[:2]), "short notes only"
    headings = ["", "chance", "one", "two", "DeltaNet\n1.3B", "EFLA\n1.3B"]
    assert [str(column.header) for column in shown.columns] == headings
    assert [column.justify for column in shown.columns] == ["left", *["right"] * 5]
    for index, column in enumerate(shown.columns):
        assert [(text.plain, text.style == "bold") for text in column.cells] == [
            (line[index].text.replace(" ± ", "±"), line[index].is_best)
            for line in table.lines
            if line[0].text != "average as printed"
        ]


def test_the_table_of_one_model_fits_a_terminal():
    rows = [row for row in table_rows() if row["model"] == "two" and row["task"] != CARRIED]
    rows.append(cell("two", CARRIED, word_perplexity=1.23e7, bits_per_byte=1.0))
    rows[-1]["standard_errors"]["word_perplexity"] = 1e6
    rows = [{**row, "num_items": 4} for row in rows]
    out = io.StringIO()
    Console(file=out, width=200).print(terminal(result_table(rows, "340M")))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert any(line.endswith("over the first items of a set, not over seeds.") for line in lines)


@pytest.mark.parametrize(
    ("accuracy", "error", "near"),
    [(0.27, 0.01, True), (0.2699, 0.00994, False), (0.23, 0.01, True), (0.3, 0.01, False)],
)
def test_a_note_counts_accuracies_within_two_standard_errors_of_chance(accuracy, error, near):
    rows = [cell("m", "sciq", acc=accuracy), cell("m", "lambada_openai", acc=0.0, perplexity=9.0, bits_per_byte=1.0)]
    rows[0]["standard_errors"]["acc"] = error
    rows.append(cell("n", "sciq", acc=0.25))
    rows[-1]["standard_errors"]["acc"] = math.nan  # of one item: not judged
    notes = result_table(rows, "none").notes
    assert notes[1:] == (
        ["1 of the 1 multiple-choice accuracies lie within two standard errors of chance."] if near else []
    )


def test_a_comparison_in_words():
    wiki, piqa, bits = COLUMNS[0], COLUMNS[3], EXTRA_COLUMNS[0]
    found = [
        (wiki, Difference(20.0, 18.5, -2.0, -1.0, 0.0004, 1234)),
        (piqa, Difference(50.0, 47.0, -4.0, -2.0, 0.001, 10)),
        (piqa, Difference(50.0, 53.0, 2.0, 4.0, 0.004, 10)),
        (piqa, Difference(50.0, 51.0, -1.0, 3.0, 0.5, 10)),
        (bits, Difference(1.25, 1.0, -0.5, 0.25, 0.2, 3)),
        (bits, Difference(1.0, 1.25, 0.125, 0.5, 0.002, 3)),
        (wiki, Difference(1e6, 4e6, 1e6, 3e6, 0.0, 3)),
        (wiki, Difference(math.inf, 4e6, 1e6, 3e6, 0.0, 3000)),
    ]
    headings, lines = comparison_lines("a", "b", found)
    assert headings == ["", "items", "A: a", "B: b", "B - A", "95 % interval", "p", "verdict"]
    assert lines == [
        ["Wiki. ppl", "1,234", "20.00", "18.50", "-1.50", "-2.00 to -1.00", "< 0.001", "B better"],
        ["PIQA", "10", "50.00", "47.00", "-3.00", "-4.00 to -2.00", "0.001", "A better"],
        ["PIQA", "10", "50.00", "53.00", "+3.00", "+2.00 to +4.00", "0.004", "B better"],
        ["PIQA", "10", "50.00", "51.00", "+1.00", "-1.00 to +3.00", "0.500", "no clear difference"],
        ["Wiki. bits/byte", "3", "1.250", "1.000", "-0.250", "-0.500 to +0.250", "0.200", "no clear difference"],
        ["Wiki. bits/byte", "3", "1.000", "1.250", "+0.250", "+0.125 to +0.500", "0.002", "A better"],
        ["Wiki. ppl", "3", "1e+06", "4e+06", "+3e+06", "+1e+06 to +3e+06", "< 0.001", "A better"],
        ["Wiki. ppl", "3000", "inf", "4e+06", "", "", "", "not finite"],
    ]


def write_model(output: Path, model: str, right: int, tasks: list[str], doc_hash: str = "x") -> list[Row]:
    """Ten items of each task, the first ``right`` of them right; WikiText's have -2 nats a word."""
    for task in tasks:
        about = [{"doc_id": i, "doc_hash": doc_hash, "words": 2, "bytes": 8} for i in range(10)]
        values = [{"acc": i < right, "acc_norm": i < right, "log_prob": -4.0 - 0.1 * right} for i in range(10)]
        write_items(items_path(output, model, task), [a | v for a, v in zip(about, values, strict=True)])
    return [{"row": "cell", "model": model, "task": task} for task in tasks]


def test_a_comparison_pairs_what_both_have_and_needs_all_nine_for_the_mean(tmp_path):
    nine = list(dict.fromkeys(column.task for column in ACCURACIES))
    rows = write_model(tmp_path, "a", 4, ["wikitext", *nine]) + write_model(tmp_path, "b", 6, ["wikitext", *nine])
    found = {column.title: difference for column, difference in compare_models(rows, tmp_path, "a", "b", times=300)}
    assert list(found) == [*(c.title for c in (*COLUMNS, *EXTRA_COLUMNS) if c.task != CARRIED), MEAN.title]
    assert (found["PIQA"].a, found["PIQA"].b, found["PIQA"].num_items) == pytest.approx((40, 60, 10))
    assert (found[MEAN.title].a, found[MEAN.title].b, found[MEAN.title].num_items) == pytest.approx((40, 60, 90))
    assert 0 <= found["PIQA"].low < 20 < found["PIQA"].high <= 60
    assert 10 < found[MEAN.title].low < 20 < found[MEAN.title].high < 30, "nine tasks are narrower than one"
    assert found["Wiki. ppl"].a == pytest.approx(math.exp(2.2))
    assert found["Wiki. bits/byte"].b == pytest.approx(4.6 / 8 / math.log(2))
    fewer = [row for row in rows if (row["model"], row["task"]) != ("b", "sciq")]
    assert {"SciQ", MEAN.title}.isdisjoint(c.title for c, _ in compare_models(fewer, tmp_path, "a", "b", times=10))
    with pytest.raises(ValueError, match=r"'a' and 'c' have no task of the paper in common"):
        compare_models(rows, tmp_path, "a", "c")
    other = write_model(tmp_path, "d", 6, ["piqa"], doc_hash="y")
    with pytest.raises(ValueError, match="of different items"):
        compare_models([*rows, *other], tmp_path, "a", "d")
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl is missing: .*evaluate it again"):
        read_items(tmp_path / "gone.jsonl")


def length_rows() -> list[Row]:
    """Bits at three positions and recall of two numbers of pairs at two lengths, of two models of the same mixer."""
    rows: list[Row] = []
    for model, shift in (("ours", 0.0), ("theirs", 0.5)):
        about = {"model": model, "cell": model}
        for start, end in ((1, 64), (65, 128), (129, 1024)):
            bits = 2.0 + shift - end / 1024
            rows.append({**about, "row": "position", "start": start, "end": end, "bits_per_byte": bits,
                         "bits_per_token": 2 * bits, "standard_error": 0.25})  # fmt: skip
        for pairs, length in ((2, 16), (4, 16), (2, 1024), (4, 1024)):
            if (model, pairs, length) != ("theirs", 4, 1024):
                rows.append({**about, "row": "recall", "num_pairs": pairs, "length": length, "chance": 1 / pairs,
                             "among_values": 0.5 + shift / 10, "among_values_error": 0.05})  # fmt: skip
        rows.append({**about, "row": "cell", "mixers": "efla x 2"})
    return rows


SHOWN = """\
bits per byte by position, state carried
position ours theirs
1 to 64 1.938 2.438
65 to 128 1.875 2.375
129 to 1,024 1.000 1.500
recall among the sequence's values, percent
pairs length chance ours theirs
2 16 50.0 50.0 55.0
4 16 25.0 50.0 55.0
2 1,024 50.0 50.0 55.0
4 1,024 25.0 50.0 –"""  # noqa: RUF001


def test_long_contexts_are_shown_as_two_tables(tmp_path, monkeypatch):
    monkeypatch.setattr("efla.runs.vega.unavailable", lambda: None)
    monkeypatch.setattr("efla.runs.vega.save_all", lambda figures, folder: [folder / "a.svg"])
    out = io.StringIO()
    show_length(length_rows(), tmp_path, Console(file=out, width=100))
    words = re.sub("[─-╿]", " ", out.getvalue()).split()  # without the lines of the tables
    assert words == [*SHOWN.split(), "figure:", str(tmp_path / "figures" / "a.svg")]
    out = io.StringIO()
    show_length([row for row in length_rows() if row["row"] == "cell"], tmp_path, Console(file=out))
    assert out.getvalue().split() == ["figure:", str(tmp_path / "figures" / "a.svg")]
    reason = "altair [missing] " * 9
    monkeypatch.setattr("efla.runs.vega.unavailable", lambda: reason)
    out = io.StringIO()
    show_length([], tmp_path, Console(file=out, width=40))
    assert out.getvalue() == f"no figures: {reason}\n", "neither wrapped nor read as markup"


def test_a_model_has_its_mixers_colour_where_it_is_free():
    rows = [{"row": "cell", "model": name, "mixers": mixers} for name, mixers in (
        ("a", "efla x 2"), ("b", "softmax x 2"), ("c", "efla x 4"), ("d", "llama"), ("e", "mamba2 x 1"))]  # fmt: skip
    keys = line_keys([{"row": "position", "model": "f"}, *rows])
    assert list(keys) == list("abcde")
    assert (keys["a"], keys["b"], keys["e"]) == ("efla", "attention", "mamba2")
    assert len(set(keys.values())) == 5
    assert set(keys.values()) <= set(LOOKS)
    many = line_keys([{"row": "cell", "model": str(i), "mixers": "llama"} for i in range(20)])
    assert len(set(many.values())) == 7, "colours come round again"


def test_figures_hold_the_numbers_of_the_rows():
    position, by_pairs, by_length = length_figures(length_rows())
    assert [f.name for f in (position, by_pairs, by_length)] == [
        "bits_by_position",
        "recall_by_pairs",
        "recall_by_length",
    ]
    assert position.title == "Loss by position, state carried"
    (everything,) = position.charts
    assert (everything.x_label, everything.y_label, everything.log_x) == ("position", "bits per byte", True)
    assert everything.x_ticks == [64, 128, 1024]
    curves, x = values_of(everything), (64, 128, 1024)
    assert curves["ours"] == [(e, pytest.approx(2 - e / 1024)) for e in x]
    assert curves["theirs"] == [(e, pytest.approx(2.5 - e / 1024)) for e in x]
    # The error is in bits per token, of which a byte has half as many.
    bands = [(p.x, p.low, p.high) for p in everything.series[0].points]
    assert bands == [(e, pytest.approx(1.875 - e / 1024), pytest.approx(2.125 - e / 1024)) for e in x]
    assert [(c.title, c.x_label, c.y_label, c.y_range) for c in by_pairs.charts] == [
        ("16 tokens", "pairs", "recall among the values, %", (0, 102)),
        ("1,024 tokens", "pairs", "recall among the values, %", (0, 102)),
    ]
    assert values_of(by_pairs.charts[0])["chance"] == [(2, 50), (4, 25)]
    assert values_of(by_pairs.charts[0])["theirs"] == [(2, pytest.approx(55)), (4, pytest.approx(55))]
    assert values_of(by_pairs.charts[1])["theirs"] == [(2, pytest.approx(55))]
    near = pytest.approx
    for series, mean in zip(by_pairs.charts[0].series, (50, 55), strict=False):
        assert [(p.x, p.low, p.high) for p in series.points] == [(n, near(mean - 5), near(mean + 5)) for n in (2, 4)]
    assert [one.label for one in by_pairs.legend] == ["ours", "theirs", "chance"]
    assert [(c.title, c.x_label) for c in by_length.charts] == [("2 pairs", "length"), ("4 pairs", "length")]
    assert values_of(by_length.charts[0])["ours"] == [(16, 50), (1024, 50)]
    assert length_figures([row for row in length_rows() if row["row"] == "cell"]) == []


def values_of(chart: Chart) -> dict[str, list[tuple[Any, float]]]:
    return {one.label: [(p.x, p.y) for p in one.points] for one in chart.series}


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (999_999.0, 1234.5, "999,999.00 ± 1,234.50"),
        (1e6, 1234.5, "1e+06 ± 1e+03"),
        (2.0, math.nan, "2.00"),
        (math.inf, 1.0, "not finite"),
    ],
)
def test_large_numbers_are_short(value, error, shown):
    rows = [cell("m", "wikitext", word_perplexity=value, bits_per_byte=1.0)]
    rows[0]["standard_errors"]["word_perplexity"] = error
    assert result_table(rows, "none").lines[0][2].text == shown


@pytest.mark.parametrize(("count", "every"), [(8, 1), (9, 2), (17, 2), (18, 3)])
def test_many_positions_are_thinned_out_on_the_axis(count, every):
    rows = [row for row in length_rows() if row["row"] != "recall"][:1] * count
    rows = [{**row, "end": 2**i} for i, row in enumerate(rows)]
    figure = length_figures([*rows, length_rows()[-1] | {"model": "ours"}])[0]
    assert figure.charts[0].x_ticks == [2**i for i in range(0, count, every)]


def test_names_become_file_names_and_rows_a_line(tmp_path):
    assert [file_name("org/model v2"), file_name("..."), file_name(".a-b_c.")] == ["org__model__v2", "model", "a-b_c"]
    assert items_path(tmp_path, "a/b", "c d") == tmp_path / "items" / "a__b" / "c__d.jsonl"
    rows = [{"metrics": {"acc": 0.123456, "ppl": 1234567}}]
    assert TaskEvaluation(EvaluationSettings()).summary(rows) == "acc 0.1235  ppl 1.235e+06"


def test_the_mean_has_a_column_of_its_own():
    assert isinstance(MEAN, Column)
    assert (MEAN.unit, MEAN.lower_is_better) == (100.0, False)
