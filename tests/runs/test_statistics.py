"""Verdicts follow from means and standard deviations by one rule."""

from __future__ import annotations

import math

import pytest

from efla.runs.statistics import Rows, Spread, judge, level_mean, spread


def test_the_spread_is_the_standard_deviation_over_seeds() -> None:
    assert spread([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 3, (1.0, 2.0, 3.0))
    assert spread([1.0]).text() == "1.0"
    assert spread([0.5, 0.7]).text(100) == "60.0 ± 14.1"
    assert spread([1.0, math.nan]).text() == "not finite"
    assert spread([0.5, 0.7]).percent() == "60.0 ± 14.1 %"
    assert spread([math.nan]).percent() == "not finite"


def test_the_mean_over_levels_is_a_trapezoid_on_the_index() -> None:
    assert level_mean([1.0, 0.5, 0.0]) == 0.5
    assert level_mean([1.0, 1.0, 0.0]) == 0.75
    with pytest.raises(ValueError, match="at least two levels"):
        level_mean([1.0])


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (Spread(0.8, 0.02, 3), Spread(0.7, 0.05, 3), "seen"),
        (Spread(0.7, 0.02, 3), Spread(0.8, 0.05, 3), "reversed"),
        (Spread(0.8, 0.02, 3), Spread(0.76, 0.05, 3), "not seen"),
        (Spread(0.8, 0.05, 3), Spread(0.76, 0.02, 3), "not seen"),
        (Spread(0.8, math.nan, 1), Spread(0.1, math.nan, 1), "not judged"),
        (Spread(0.8, 0.01, 3), Spread(math.nan, math.nan, 3), "seen"),
        (Spread(math.nan, math.nan, 3), Spread(0.8, 0.1, 3), "reversed"),
    ],
)
def test_a_difference_is_seen_when_it_exceeds_the_larger_standard_deviation(
    ours: Spread, theirs: Spread, verdict: str
) -> None:
    assert judge(ours, theirs) == verdict


def test_lower_is_better_for_a_loss() -> None:
    assert judge(Spread(0.3, 0.01, 3), Spread(0.5, 0.01, 3), lower_is_better=True) == "seen"


def test_rows_are_selected_by_their_fields_and_summarised_over_seeds() -> None:
    rows = Rows(
        {"row": row, "arm": arm, "seed": seed, "level": level, "loss": loss}
        for row, arm, seed, level, loss in (
            ("cell", "a", 0, 2, 1.0), ("cell", "a", 1, 2, 3.0), ("cell", "a", 0, 1, "nan"), ("point", "a", 0, 1, 9.0),
            ("cell", "b", 0, 1, 5.0),
        )
    )  # fmt: skip
    assert rows.cells().where(arm="a", level=2).spread("loss") == spread([1.0, 3.0])
    assert rows.where(absent=1) == []
    assert rows.values("arm", order=("c", "b", "a")) == ["b", "a"]
    assert rows.values("level") == [1, 2]
    levels, spreads = rows.cells().where(arm="a").curve("level", "loss")
    assert levels == [1, 2]
    assert math.isnan(spreads[0].mean)
    assert spreads[1] == spread([1.0, 3.0])
    assert rows.where(arm="b").curve("seed", lambda row: 2 * row["loss"])[1] == [spread([10.0])]
