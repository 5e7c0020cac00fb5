"""Standard errors, paired differences and the table, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from efla.evaluation.items import (
    Items,
    metric_items,
    paired_difference,
    resamples,
    standard_errors,
)
from efla.evaluation.table import (
    ACCURACIES,
    COLUMNS,
    PRINTED_AVERAGES,
    markdown,
    mean_accuracy,
    paper_rows,
    result_table,
    terminal,
)


def test_the_papers_means_are_recomputed_from_its_rows():
    """The printed average of DeltaNet 340M is wrong, that of EFLA 1.3B is rounded up."""
    means = {(size, model): mean_accuracy(row) for size in ("340M", "1.3B") for model, row in paper_rows(size).items()}
    expected = {
        ("340M", "Mamba-2"): 41.99,
        ("340M", "DeltaNet"): 43.11,
        ("340M", "EFLA"): 44.07,
        ("340M", "Gated DeltaNet"): 43.90,
        ("340M", "Gated EFLA"): 44.78,
        ("1.3B", "DeltaNet"): 50.47,
        ("1.3B", "EFLA"): 51.74,
    }
    assert {key: round(value, 2) for key, value in means.items()} == expected
    assert PRINTED_AVERAGES["340M"]["DeltaNet"] == 42.2
    assert mean_accuracy({"piqa": 50.0}) is None
    assert len(ACCURACIES) == 9 and len(COLUMNS) == 11


def test_standard_errors_are_those_of_the_definitions():
    records = [{"acc": float(i < 30)} for i in range(100)]
    items = metric_items(records, "acc")
    assert items.metric() == pytest.approx(0.3)
    assert items.standard_error() == pytest.approx(math.sqrt(0.3 * 0.7 / 99))  # the harness's: n - 1 in the denominator
    generator = np.random.default_rng(0)
    log_probs = generator.normal(-3.0, 0.5, 4000)
    perplexity = metric_items([{"log_prob": float(x)} for x in log_probs], "perplexity")
    assert perplexity.metric() == pytest.approx(math.exp(-log_probs.mean()))
    expected = math.exp(-log_probs.mean()) * 0.5 / math.sqrt(4000)  # the delta method
    assert perplexity.standard_error() == pytest.approx(expected, rel=0.1)
    bits = metric_items([{"log_prob": -math.log(2) * 8, "words": 3, "bytes": 4}] * 2, "bits_per_byte")
    assert bits.metric() == pytest.approx(2.0)
    words = metric_items([{"log_prob": -6.0, "words": 2, "bytes": 4}, {"log_prob": -6.0, "words": 4, "bytes": 4}],
                         "word_perplexity")  # fmt: skip
    assert words.metric() == pytest.approx(math.exp(2.0))


def test_one_item_has_no_standard_error_and_two_have_half_their_difference():
    assert math.isnan(accuracies(np.array([1])).standard_error())
    assert accuracies(np.array([0, 1])).standard_error() == pytest.approx(0.5)
    records = [{"x": 1.0, "acc": True, "log_prob": -2.0, "words": 1, "bytes": 2}, {"x": 4.0, "acc": False, "log_prob": -2.0,
               "words": 1, "bytes": 2}]  # fmt: skip
    found = standard_errors(records, ["acc", "x", "unknown", "bits_per_byte"])
    assert list(found) == ["acc", "x", "unknown", "bits_per_byte"]
    assert (found["acc"], found["x"], found["bits_per_byte"]) == pytest.approx((0.5, 1.5, 0.0))
    assert math.isnan(found["unknown"])
    assert math.isnan(standard_errors(records[:1], ["x"])["x"])


def test_metrics_by_their_names():
    records = [{"acc": 1, "acc_norm": 0, "log_prob": -6.0, "words": 2, "bytes": 4}]
    found = {m: metric_items(records, m).metric() for m in
             ("acc", "acc_norm", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")}  # fmt: skip
    e = math.exp
    assert found == pytest.approx({"acc": 1, "acc_norm": 0, "perplexity": e(6), "word_perplexity": e(3),
                                   "byte_perplexity": e(1.5), "bits_per_byte": 1.5 / math.log(2)})  # fmt: skip
    exact = {m: metric_items(records, m).exact_metric() for m in found}
    assert exact == pytest.approx(found, rel=1e-15)
    hopeless = metric_items([{"log_prob": -1e4}], "perplexity")
    assert hopeless.metric() == hopeless.exact_metric() == math.inf


def test_exact_metrics_round_once():
    """Sums in which small numbers would be lost one by one."""
    records = [{"log_prob": value, "words": 1, "bytes": 1} for value in (-1e16, -1.0, -1.0, 1e16)]
    assert metric_items(records, "bits_per_byte").exact_metric() == 2 / 4 / math.log(2)
    assert metric_items(records, "word_perplexity").exact_metric() == pytest.approx(math.exp(0.5), rel=1e-15)


def test_resamples_are_whole_and_the_same_for_the_same_seed():
    first, again = (list(resamples(7, 450, seed=3)) for _ in range(2))
    assert [counts.shape for counts in first] == [(200, 7), (200, 7), (50, 7)]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    drawn = np.concatenate(first)
    assert (drawn.sum(1) == 7).all()
    assert np.abs(drawn.mean(0) - 1).max() < 4 / math.sqrt(450)
    assert not (drawn[:50] == np.concatenate(list(resamples(7, 50, seed=4)))).all()


def accuracies(values: np.ndarray) -> Items:
    return Items("mean", values.astype(float), np.ones(len(values)))


def test_pairing_takes_out_what_both_models_share():
    """Two models that err on the same items differ clearly; unpaired, the difference would drown."""
    generator = np.random.default_rng(0)
    a = generator.random(2000) < 0.5
    b = a.copy()
    b[np.flatnonzero(~a)[:40]] = True  # right on 40 more, wrong on none
    found = paired_difference((accuracies(a), accuracies(b)), times=4000)
    assert found.value == pytest.approx(0.02)
    half_width = 1.96 * math.sqrt(0.02 * 0.98 / 2000)
    assert found.low == pytest.approx(0.02 - half_width, abs=1.5e-3)
    assert found.high == pytest.approx(0.02 + half_width, abs=1.5e-3)
    assert found.is_clear and found.p_value < 0.001
    unpaired = 1.96 * math.sqrt(2 * 0.25 / 2000)
    assert unpaired > 0.02  # what the standard errors of the table alone would say


@pytest.mark.parametrize("more", [1, -1], ids=["B is better", "A is better"])
def test_the_p_value_counts_both_sides(more):
    """Of 100 items on which the models differ, B is right on 60 (or 40): as the normal approximation has it."""
    a, b = np.zeros(400), np.zeros(400)
    a[:40], b[40:100] = 1, 1
    found = paired_difference(tuple(accuracies(x) for x in ((a, b) if more > 0 else (b, a))))
    assert found.value == pytest.approx(more * 0.05)
    z = (20 - 0.5) / math.sqrt(400 * (0.25 - 0.05**2))  # sum and deviation of the differences, continuity corrected
    two_sided = math.erfc(z / math.sqrt(2))
    error = 2 * math.sqrt(0.5 * two_sided * (1 - 0.5 * two_sided) / 10_000)  # of 10,000 resamples
    assert found.p_value == pytest.approx(two_sided, abs=4 * error)
    assert not found.is_clear


def test_equal_models_have_no_clear_difference_and_a_known_one_is_covered():
    generator = np.random.default_rng(1)
    a, b = generator.random(500) < 0.4, generator.random(500) < 0.4
    same = paired_difference((accuracies(a), accuracies(a)))
    assert (same.value, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    # The 95 % interval of a true difference of zero holds zero about 95 times in 100.
    held = 0
    for seed in range(200):
        draw = np.random.default_rng(seed + 10)
        pair = accuracies(draw.random(200) < 0.5), accuracies(draw.random(200) < 0.5)
        found = paired_difference(pair, times=400, seed=seed)
        held += found.low <= 0 <= found.high
    assert 180 <= held <= 199
    mean = paired_difference((accuracies(a), accuracies(b)), (accuracies(b), accuracies(a)), times=500)
    assert mean.value == pytest.approx(0.0)
    with pytest.raises(ValueError, match="only the same items"):
        paired_difference((accuracies(a), accuracies(b[:-1])))


def cell(model: str, task: str, **metrics: float) -> dict:
    return {
        "row": "cell",
        "cell": f"{model}/{task}",
        "model": model,
        "task": task,
        "metrics": metrics,
        "standard_errors": {name: 0.01 for name in metrics},
        "num_items": 10,
        "num_items_in_set": 10,
    }


def test_the_table_marks_the_best_and_shows_chance_and_the_papers_numbers():
    rows = []
    for model, shift in (("one", 0.0), ("two", 0.1)):
        for column in COLUMNS:
            value = 0.3 + shift if column.is_accuracy else 20.0 + 10 * shift
            existing = next((r for r in rows if r["model"] == model and r["task"] == column.task), None)
            if existing:
                existing["metrics"][column.metric] = value
                existing["standard_errors"][column.metric] = 0.01
            else:
                rows.append(cell(model, column.task, **{column.metric: value, "bits_per_byte": 1.0}))
    table = result_table(rows, "both")
    text = markdown(table)
    assert table.headings[:4] == ["", "chance", "one", "two"]
    assert "paper: EFLA 340M" in table.headings and "paper: EFLA 1.3B" in table.headings
    by_title = {line[0].text: line for line in table.lines}
    assert by_title["Wiki. ppl"][2].is_best and not by_title["Wiki. ppl"][3].is_best  # lower is better
    assert by_title["PIQA"][3].is_best and by_title["PIQA"][3].text == "40.0 ± 1.0"
    assert by_title["BoolQ"][1].text == "62.2"
    mean = by_title["mean of the 9"]
    assert mean[2].text == "30.00 ± 0.33" and mean[3].is_best
    assert [cell.text for cell in mean[4:]] == ["41.99", "43.11", "44.07", "43.90", "44.78", "50.47", "51.74"]
    assert [cell.text for cell in by_title["average as printed"][4:6]] == ["42.0", "42.2"]
    assert not any(cell.is_best for cell in by_title["Wiki. bits/byte"])  # equal: none is best
    assert "**40.0 ± 1.0**" in text and "one standard error" in text
    assert terminal(table).row_count == len(table.lines) - 1, "all but the averages that the paper prints"


def test_the_mean_needs_all_nine_and_partial_sets_are_named():
    rows = [cell("m", "piqa", acc=0.5), cell("m", "sciq", acc=0.26), cell("n", "piqa", acc=math.nan)]
    rows[0]["num_items_in_set"] = 1838
    table = result_table(rows, "none")
    assert [line[0].text for line in table.lines] == ["PIQA", "SciQ"]
    assert table.lines[1][3].text == "–"  # noqa: RUF001
    assert table.lines[0][3].text == "not finite"
    assert any("Only the first items were scored of: piqa" in note for note in table.notes)
    assert any("within two standard errors of chance" in note for note in table.notes)
