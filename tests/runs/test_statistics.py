"""Verdicts follow from paired differences over seeds by one rule."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from efla.runs.statistics import (
    Difference,
    Rows,
    Spread,
    advantages,
    compare,
    difference,
    every,
    spread,
    t_quantile,
    within,
)


def test_the_spread_is_the_standard_deviation_over_seeds() -> None:
    assert spread([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 3, (1.0, 2.0, 3.0))
    assert spread([1.0]).text() == "1.0"
    assert spread([0.5, 0.7]).text(100) == "60.0 ± 14.1"
    assert spread([1.0, math.nan]).text() == "not finite"
    assert spread([0.5, 0.7]).text(100) == "60.0 ± 14.1"
    assert spread([math.nan]).text(100) == "not finite"


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272), (100, 1.983972)],
)
def test_quantiles_of_students_t_are_those_of_printed_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-6)
    assert t_quantile(0.5, freedom) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"0\.5 <= probability < 1"):
        t_quantile(0.1, freedom)


def test_the_interval_is_students_t_on_the_differences_by_seed() -> None:
    # By hand: mean 3, sd 1, so 4.302653 / sqrt(3) on either side.
    found = difference([2.0, 3.0, 4.0])
    assert found[:4] == (3.0, pytest.approx(3 - 2.484138), pytest.approx(3 + 2.484138), 3)
    assert found.detectable == pytest.approx(2.484138)
    assert found.verdict == "seen"
    assert found.text("points") == "+3.0 points [+0.5, +5.5], n = 3, detectable 2.5"
    assert difference([-2.0, -3.0, -4.0]).verdict == "reversed"
    assert difference([1.0, 3.0, 5.0]).verdict == "not seen"
    assert difference([0.0, 0.0, 0.0]).verdict == "not seen"
    assert difference([9.0]).verdict == difference([]).verdict == "not judged"


def test_seeds_are_paired_and_what_they_share_drops_out() -> None:
    ours = {seed: 10.0 * seed + 1 for seed in range(5)}
    theirs = {seed: 10.0 * seed for seed in (4, 3, 2, 1, 0, 7)}
    claim = compare("a", "S", "p", ours, theirs, unit="points")
    assert claim.difference == Difference(1.0, 1.0, 1.0, 5, 5, 0)
    assert claim.reason == "21.0 against 20.0; 1 unpaired seed left out"
    assert compare("a", "S", "p", ours, theirs, unit="", lower_is_better=True).verdict == "reversed"
    apart = compare("a", "S", "p", {0: 1.0}, {1: 1.0}, unit="")
    assert (apart.verdict, apart.text()) == ("not judged", "no pairs; no seed of both arms; 2 unpaired seeds left out")


def test_relative_differences_are_percent_of_theirs_for_each_seed() -> None:
    found = advantages({0: 90.0, 1: 40.0}, {0: 100.0, 1: 50.0}, lower_is_better=True, relative=True)
    assert found == {0: pytest.approx(10), 1: pytest.approx(20)}


def test_a_diverged_run_loses_its_pair_and_a_sign_test_judges() -> None:
    def judged(ours: list[float], theirs: list[float]) -> Difference:
        pairs = dict(enumerate(ours)), dict(enumerate(theirs))
        return difference(advantages(*pairs, lower_is_better=True).values())

    nan = math.nan
    assert judged([1.0] * 6, [2.0] * 5 + [nan]).verdict == "seen", "six of six: 1.6 %"
    assert judged([1.0] * 5, [2.0] * 4 + [nan]).verdict == "not seen", "five of five: 3.1 %"
    assert judged([nan, *[2.0] * 5], [1.0] * 6).verdict == "reversed"
    both = judged([nan, 1.0, 1.0], [nan, 2.0, math.inf])
    assert both[3:] == (3, 2, 0) and math.isnan(both.mean)
    assert both.text() == "won 2, lost 0 of 3 pairs (sign test)"
    assert both.seeds_needed() is None


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_without_an_effect_a_verdict_is_wrong_in_five_percent_of_draws(n: int) -> None:
    draws = 10_000
    noise = np.random.default_rng(n).normal(size=(draws, n))
    verdicts = Counter(difference(values).verdict for values in noise)
    # 99.9 % of such counts lie within 3.29 standard deviations of 2.5 %.
    allowed = 3.29 * math.sqrt(draws * 0.025 * 0.975)
    for verdict in ("seen", "reversed"):
        assert abs(verdicts[verdict] - 0.025 * draws) < allowed
    # A claim that must hold three times is seen no more often.
    rest = (every([difference(v) for v in noise[start : start + 3]])[0] for start in range(0, draws - 3, 3))
    assert sum(verdict == "seen" for verdict in rest) < 0.025 * draws / 3


def test_with_the_seeds_that_are_needed_an_effect_is_seen_in_four_of_five_draws() -> None:
    observed = difference([0.0, 1.0, 2.0, 3.0])  # sd 1.29
    seeds = observed.seeds_needed(1.0)
    assert seeds is not None
    sd = np.std([0.0, 1.0, 2.0, 3.0], ddof=1)
    noise = np.random.default_rng(0).normal(1.0, sd, size=(4000, seeds))
    assert np.mean([difference(values).verdict == "seen" for values in noise]) == pytest.approx(0.8, abs=0.03)
    assert observed.seeds_needed() == observed.seeds_needed(1.5) < seeds  # type: ignore[operator]
    assert difference([-1.0, 1.0]).seeds_needed() is None, "no effect at all"
    assert difference([-1.0, 1.001]).seeds_needed() is None, "more than a thousand"


def test_a_claim_of_several_comparisons_is_as_good_as_the_one_furthest_from_it() -> None:
    good, better, worse = difference([1.0, 1.1]), difference([2.0, 2.1]), difference([-1.0, -1.1])
    assert every([good, better]) == ("seen", good)
    assert every([good, worse]) == ("not seen", worse)
    assert every([worse, worse])[0] == "reversed"
    assert every([good, difference([1.0])])[0] == "not judged"


def test_no_difference_is_claimed_when_the_interval_lies_within_the_margin() -> None:
    assert within(difference([0.9, 1.0, 1.1]), 2.0) == "seen"
    assert within(difference([-1.0, 1.0, 3.0]), 2.0) == "not seen"
    assert within(difference([2.9, 3.0, 3.1]), 2.0) == within(difference([-2.9, -3.0, -3.1]), 2.0) == "reversed"
    assert within(difference([0.0]), 2.0) == "not judged"


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
    assert rows.where(arm="b").curve("seed", "loss")[1] == [spread([5.0])]
