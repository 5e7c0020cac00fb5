"""Scores, verdicts, figures and the report's section, from rows with made-up numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from efla.experiments.mad.claims import Runs, claims, published, text_summary
from efla.experiments.mad.config import HARD, TASK_ORDER, profile
from efla.experiments.mad.run import Mad
from efla.experiments.mad.tasks import changed
from efla.runs.records import dumps, to_record
from efla.runs.rows import append_rows
from tests.report.pages import charts_of
from tests.report.pages import rows_of as drawn_rows

Row = dict[str, object]
ARMS = ("delta-l2", "exact-flow", "delta-raw")


def rows_of(
    accuracy: Callable[[str, str, str, float, int], float],
    seeds: tuple[int, ...] = (12345, 12346, 12347),
    settings: tuple[str, ...] = ("baseline", "hard"),
    tasks: tuple[str, ...] = TASK_ORDER,
) -> list[Row]:
    """Rows as the runs write them; ``accuracy(task, setting, arm, rate, seed)`` makes up the scores."""
    found = []
    config = to_record(profile("full"))
    for task in tasks:
        names = {"baseline": "baseline", "hard": changed(task, *HARD[task]).name}
        for setting in settings:
            for arm in ARMS:
                for rate in (5e-4, 1e-3):
                    for seed in seeds if setting == "baseline" and arm != "delta-raw" else seeds[:1]:
                        value = accuracy(task, setting, arm, rate, seed)
                        row: Row = {
                            "row": "cell", "cell": f"{task} {setting} {arm} {rate} {seed}", "rows": 1, "task": task,
                            "setting": names[setting], "arm": arm, "rate": rate, "decay": 0.0, "seed": seed, "profile": "full",
                            "parameters": 410_320, "steps": 1000, "budget": 3000, "best_step": 1000,
                            "reference_accuracy": value, "reference_accuracy_last": value - 0.01, "token_accuracy": value,
                            "token_accuracy_last": value, "test_loss": 0.1, "losses": [[500, 2.0], [1000, 1.0]],
                            "backend": "native", "timing": {"seconds_per_step": 0.2}, "wall_seconds": 10.0, "threads": 1,
                            "started": "2026-01-01T00:00:00", "versions": {}, "commit": "x", "machine": {},
                            "config": config, "data": {"source": "generated, seed 12345", "overlap": 0.0},
                        }  # fmt: skip
                        found.append(json.loads(dumps(row)))
    return found


def _noise(seed: int) -> float:
    return 0.001 * (seed - 12346)


def test_a_settings_score_is_the_best_over_rates_and_drops_what_is_not_finite() -> None:
    def accuracy(task: str, setting: str, arm: str, rate: float, seed: int) -> float:
        return math.nan if (rate, arm) == (1e-3, "delta-raw") else 0.5 + 100 * rate

    rows = rows_of(accuracy)
    assert Runs(rows).scores("memorization", "baseline", "exact-flow")[12345] == pytest.approx(0.6)
    assert Runs(rows).scores("memorization", "baseline", "delta-raw")[12345] == pytest.approx(0.55)
    assert Runs(rows).nonfinite("delta-raw") == 12
    assert "DeltaNet (raw keys): 12 of its runs not finite" in text_summary(rows)


def test_task_and_overall_scores_are_plain_means() -> None:
    def accuracy(task: str, setting: str, arm: str, rate: float, seed: int) -> float:
        return 0.9 if setting == "baseline" else 0.1 * TASK_ORDER.index(task)

    rows = rows_of(accuracy)
    for i, task in enumerate(TASK_ORDER):
        assert Runs(rows).task_score(task, "exact-flow").mean == pytest.approx((0.9 + 0.1 * i) / 2)
    assert Runs(rows).overall_score("exact-flow") == pytest.approx(0.45 + 0.25 / 2)
    assert math.isnan(Runs(rows[: len(rows) // 2]).overall_score("exact-flow"))


def test_verdicts_follow_the_differences_by_seed() -> None:
    gain = {"memorization": 0.05, "compression": 0.04, "in-context-recall": 0.0, "noisy-in-context-recall": 0.0006,
            "fuzzy-in-context-recall": -0.03, "selective-copying": 0.01}  # fmt: skip

    def accuracy(task: str, setting: str, arm: str, rate: float, seed: int) -> float:
        return 0.5 + 20 * _noise(seed) + (gain[task] + _noise(seed) if arm == "exact-flow" else 0.0)

    found = claims(rows_of(accuracy))
    main = {claim.pair: claim for claim in found if "against" not in claim.pair}
    assert {pair: claim.verdict for pair, claim in main.items()} == {
        "all six tasks": "not seen", "memorization (baseline)": "seen", "compression (baseline)": "seen",
        "in-context-recall (baseline)": "not seen", "noisy-in-context-recall (baseline)": "not seen",
        "fuzzy-in-context-recall (baseline)": "reversed", "selective-copying (baseline)": "seen",
        "mean of six tasks": "seen", "these two minus the rest": "seen",
    }  # fmt: skip
    mean = main["mean of six tasks"]
    assert mean.difference is not None and mean.difference.mean == pytest.approx(1.1767, abs=1e-3)
    assert mean.paper == pytest.approx(0.7) and "other settings and another budget" in mean.reason
    raw = [claim for claim in found if "DeltaNet (raw keys)" in claim.pair]
    assert [claim.letter for claim in raw] == ["a", "b", "c"], "no line a task without a verdict"
    assert {claim.verdict for claim in raw} == {"not judged"}


def test_better_on_all_six_tasks_is_seen_only_if_it_is_on_each_and_none_is_missing() -> None:
    def first(gain: dict[str, float], tasks: tuple[str, ...] = TASK_ORDER) -> tuple[str, str]:
        def accuracy(task: str, setting: str, arm: str, rate: float, seed: int) -> float:
            return 0.5 + (gain.get(task, 0.05) + _noise(seed) if arm == "exact-flow" else 0.0)

        claim = claims(rows_of(accuracy, tasks=tasks))[0]
        assert claim.letter == "a" and claim.pair == "all six tasks"
        return claim.verdict, claim.reason

    assert first({})[0] == "seen"
    verdict, reason = first({"fuzzy-in-context-recall": -0.03})
    assert verdict == "not seen" and reason.startswith("shown: fuzzy-in-context-recall (baseline), furthest")
    assert reason.endswith("reversed at fuzzy-in-context-recall (baseline)")
    assert first(dict.fromkeys(TASK_ORDER, -0.05))[0] == "reversed"
    verdict, reason = first({}, tasks=TASK_ORDER[:5])
    assert verdict == "not judged" and reason.endswith("not run: 1 of 6 tasks")


def test_only_seeds_of_both_arms_are_compared() -> None:
    def accuracy(task: str, setting: str, arm: str, rate: float, seed: int) -> float:
        return {12345: 0.5, 12346: 0.9, 12347: 0.9}[seed] - 0.1 * (arm == "delta-raw")

    mean = next(c for c in claims(rows_of(accuracy)) if c.letter == "b" and "raw" in c.pair)
    assert mean.difference is not None and mean.difference.n == 1
    assert mean.reason == "50.00 against 40.00; 2 unpaired seeds left out"


def test_arms_with_fewer_tasks_leave_the_scores_of_the_others_alone() -> None:
    rows = rows_of(
        lambda task, setting, arm, rate, seed: 0.9 if setting == "baseline" else 0.1 * TASK_ORDER.index(task)
    )
    pair = {"delta-l2": "gated-delta", "exact-flow": "gated-exact-flow"}
    gated = [
        row | {"arm": pair[row["arm"]], "reference_accuracy": 0.5}  # type: ignore[index]
        for row in rows
        if row["task"] == "compression" and row["setting"] == "baseline" and row["arm"] in pair
    ]
    for task in TASK_ORDER:
        assert Runs(rows + gated).task_score(task, "exact-flow") == Runs(rows).task_score(task, "exact-flow")
    assert Runs(rows + gated).task_score("compression", "gated-delta").n == 0, "it lacks a setting"
    assert math.isnan(Runs(rows + gated).overall_score("gated-delta"))
    assert "compression (baseline), Gated EFLA against Gated DeltaNet" in {claim.pair for claim in claims(rows + gated)}


def test_claims_do_not_depend_on_the_order_in_which_cells_finished() -> None:
    rows = rows_of(lambda task, setting, arm, rate, seed: 0.5 + 0.1 * (setting == "hard") + _noise(seed))
    assert claims(rows[::-1]) == claims(rows)
    assert Runs(rows[::-1]).settings("memorization") == ["baseline", "V1024"]


def test_the_claim_about_the_largest_gains_can_be_reversed_or_unseen() -> None:
    def verdict(gain: dict[str, float]) -> str:
        def accuracy(task: str, setting: str, arm: str, rate: float, seed: int) -> float:
            spread = _noise(seed) * (task == "memorization")
            return 0.5 + ((gain.get(task, 0.0) + spread) if arm == "exact-flow" else 0.0)

        found = claims(rows_of(accuracy))
        return next(claim.verdict for claim in found if claim.letter == "c")

    others = {task: 0.05 for task in TASK_ORDER if task not in ("memorization", "compression")}
    assert verdict(others) == "reversed"
    assert verdict({"memorization": 0.005, "selective-copying": 0.01}) == "not seen"
    assert verdict({"memorization": 0.05, "compression": 0.05}) == "seen"


def test_arms_without_a_common_run_are_not_compared() -> None:
    rows = rows_of(lambda *_: 0.5)
    apart = [row for row in rows if (row["task"] == "memorization") == (row["arm"] == "exact-flow")]
    assert claims(apart) == []


def test_one_seed_gives_no_verdict() -> None:
    found = claims(rows_of(lambda *_: 0.5, seeds=(12345,)))
    assert {claim.verdict for claim in found} == {"not judged"}


def test_the_loss_curve_is_that_of_each_seeds_best_run_over_the_seeds_that_got_that_far() -> None:
    rows = rows_of(
        lambda task, setting, arm, rate, seed: 100 * rate,
        seeds=(12345, 12346),
        settings=("baseline",),
        tasks=("memorization",),
    )
    for row in rows:
        if row["rate"] == 5e-4:
            row["losses"] = [[500, 9.0], [1000, 9.0]]  # the worse rate: not drawn
        elif row["seed"] == 12346:
            row["losses"] = [[500, 1.0]]
    steps, values = Runs(rows).loss_curve("memorization", "baseline", "exact-flow")
    assert steps == [500, 1000]
    assert [(value.mean, value.n) for value in values] == [(pytest.approx(1.5), 2), (pytest.approx(1.0), 1)]


def test_a_half_finished_run_can_be_summed_up_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    rows = rows_of(lambda *_: 0.5, tasks=("memorization", "compression"))[:9]
    assert "memorization, baseline" in text_summary(rows)
    assert all(file.stat().st_size > 1000 for file in Mad.plot(rows, tmp_path))
    assert text_summary([]) == "no finished cells yet"


def test_the_report_has_bars_claims_and_the_published_numbers_with_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("altair")
    from efla.report.page import build

    monkeypatch.setattr("efla.runs.vega.library", lambda: "")

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"format": 1, "experiment": "mad", "protocol": {}}))
    for row in rows_of(lambda task, setting, arm, rate, seed: 0.5 + _noise(seed)):
        append_rows(folder, [row])
    (section,) = build([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    bars = [chart for chart in charts_of(page) if drawn_rows(chart, "bar")]
    assert [len(drawn_rows(chart, "bar")) for chart in bars] == [2 + 2 + 2] * (3 + 6), "the key figure and its own"
    assert "never with published ones" in page
    for row in published():
        assert f"{row['model']} ({row['source']})" in page
    assert len(section.claims) == (1 + 6) + 1 + 4
    assert any("one seed" in line for line in section.not_concluded)


def test_only_the_whole_reference_profile_may_be_put_beside_published_numbers() -> None:
    whole = profile("reference")
    group, config = whole.groups[0], to_record(whole)
    rows: list[Row] = [
        {
            "row": "cell", "cell": f"{name} {arm} {rate} {decay}", "task": name.split("/")[0], "setting": name.split("/")[1],
            "arm": arm, "rate": rate, "decay": decay, "seed": 12345, "profile": "reference", "config": config,
            "reference_accuracy": 0.2 if name.endswith("baseline") else 0.8,
        }
        for name in group.settings for arm in ("delta-l2", "exact-flow") for rate in group.rates for decay in group.decays
    ]  # fmt: skip
    assert len(rows) == 2 * 396
    assert "may be put beside published ones" in Runs(rows).comparability()
    assert "was not run whole" in Runs(rows[:-1]).comparability()
    assert "was not run whole" in Runs({**row, "config": {**config, "heads": 8}} for row in rows).comparability()
    assert "fewer settings" in Runs(rows_of(lambda *_: 0.5)).comparability()
    # Judged on every setting, as published averages are: 10 of the 11 at 0.8.
    again = [{**row, "cell": f"{row['cell']} again", "seed": 12346} for row in rows]
    recall = next(claim for claim in claims(rows + again) if claim.pair.startswith("in-context-recall"))
    assert "mean of 11 settings" in recall.pair and recall.reason.startswith(
        f"{100 * (0.2 + 10 * 0.8) / 11:.1f} against"
    )
    mean = next(claim for claim in claims(rows) if claim.letter == "b")
    assert "other settings" not in mean.reason


def test_the_published_means_are_those_of_their_rows() -> None:
    assert len(published()) == 13
    for row in published():
        assert sum(float(row[task]) for task in TASK_ORDER) / 6 == pytest.approx(float(row["mean"]), abs=0.11), row
