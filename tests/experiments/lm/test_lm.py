"""The language-model comparison: matched arms, the same bytes for all, cells that survive a kill."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from efla import presets
from efla.data import corpora
from efla.data.sampling import RowSampler
from efla.evaluation import Request, score
from efla.experiments.experiment import Group
from efla.experiments.lm import claims
from efla.experiments.lm import run as module
from efla.experiments.lm.config import ARM_ORDER, LmConfig, LmOptions, grid, profile
from efla.experiments.lm.measure import Subject, key_energies, measurements
from efla.experiments.lm.run import IN_PROGRESS, Cost, LanguageModels, build, train
from efla.experiments.runner import run
from efla.layers import LinearAttention
from efla.models.accounting import count_parameters
from efla.runs.records import to_record
from efla.runs.rows import read_rows
from tests.experiments.rows import without_volatile
from tests.fresh import run_fresh

QUIET = Console(quiet=True)


def tiny(**changes: Any) -> LmConfig:
    """Cells of a second: 8 steps of 2 rows of 32 bytes of Python's documentation."""
    fields: dict[str, Any] = {
        "profile": "quick", "corpus": "python-docs", "length": 32, "rows": 2, "steps": 8, "validate_every": 4,
        "validation_bytes": 256, "final_validation_bytes": 512, "test_bytes": 512, "position_rows": 2,
        "downstream": False, "save_seconds": 0.0, "groups": (Group(("exact-flow",), (2e-3,), (42,)),),
    }  # fmt: skip
    return LmConfig(**(fields | changes))


def nothing(fraction: float, **values: float) -> None:
    return None


def test_the_arms_have_the_expected_parameters_and_match_within_two_percent() -> None:
    totals = {
        "quick": {"delta-l2": 471_296, "gated-delta": 467_720, "mamba2": 469_284, "attention": 467_584},
        "full": {"delta-l2": 1_881_280, "gated-delta": 1_883_608, "mamba2": 1_848_958, "attention": 1_869_504},
    }
    alike = {
        "exact-flow": "delta-l2",
        "delta-raw": "delta-l2",
        "exact-flow-l2": "delta-l2",
        "gated-exact-flow": "gated-delta",
    }
    for name, expected in totals.items():
        for arm in ARM_ORDER:
            found = count_parameters(presets.arm(arm, name))
            assert found == expected[alike.get(arm, arm)], (name, arm)
            assert abs(found / expected["delta-l2"] - 1) < 0.02


def test_arms_of_equal_shape_start_from_equal_weights() -> None:
    config = tiny()
    ungated = [build(config, arm, 42).state_dict() for arm in ("delta-l2", "exact-flow", "delta-raw", "exact-flow-l2")]
    gated = [build(config, arm, 42).state_dict() for arm in ("gated-delta", "gated-exact-flow")]
    for family in (ungated, gated):
        for other in family[1:]:
            assert family[0].keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in family[0].items())


def test_every_arm_sees_the_same_bytes_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    original = RowSampler.batch

    def batch(self: RowSampler, *arguments: int) -> torch.Tensor:
        rows = original(self, *arguments)
        seen.setdefault(arm, []).append(rows)
        return rows

    monkeypatch.setattr(RowSampler, "batch", batch)
    config, corpus = tiny(steps=3), corpora.load("python-docs")
    for arm in ("delta-l2", "mamba2", "attention"):
        train(Subject(build(config, arm, 42), arm, 42, corpus, config), 2e-3, nothing)
    first = torch.stack(seen["delta-l2"])
    assert all(torch.equal(first, torch.stack(rows)) for rows in seen.values())
    assert len(seen["mamba2"]) == 3


def test_the_profiles_have_the_documented_budgets_and_cells() -> None:
    quick, full = profile("quick"), profile("full")
    assert (quick.corpus, quick.rows, quick.length, quick.steps) == ("shakespeare", 8, 256, 200)
    assert (full.corpus, full.rows, full.length, full.steps) == ("novels", 8, 512, 2000)
    assert (full.betas, full.eps, full.weight_decay, full.clip) == ((0.9, 0.95), 1e-8, 0.1, 1.0)
    assert len(LanguageModels(quick).cells()) == 6
    cells = LanguageModels(full).cells()
    arms = [cell.settings["arm"] for cell in cells]
    assert {arm: arms.count(arm) for arm in arms} == {
        "delta-l2": 5, "exact-flow": 5, "gated-delta": 3, "gated-exact-flow": 3, "attention": 3, "mamba2": 3,
        "delta-raw": 1, "exact-flow-l2": 1,
    }  # fmt: skip
    swept = LanguageModels(dataclasses.replace(full, groups=grid("full", sweep=True))).cells()
    assert {cell.settings["rate"] for cell in swept} == {1e-3, 2e-3, 4e-3}
    assert len(swept) == len(cells) + 4


def test_without_a_data_folder_quick_falls_back_to_an_embedded_text_and_full_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EFLA_DATA", raising=False)
    config = LmOptions().config()
    assert (config.corpus, config.downstream, config.folder) == ("python-docs", False, None)
    with pytest.raises(FileNotFoundError, match="--data DIR or EFLA_DATA"):
        LmOptions(profile="full").config()
    with pytest.raises(FileNotFoundError, match="not a folder"):
        LmOptions(data="nowhere-at-all").config()


def test_a_resumed_cell_writes_the_row_of_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at the first report, at the second, ..., in training and between measurements, and continued each time."""
    experiment = LanguageModels(tiny())
    run(experiment, tmp_path / "whole", executor="inline", console=QUIET)
    (expected,) = read_rows(tmp_path / "whole")

    interrupted = experiment.with_output(tmp_path / "parts")
    (cell,) = interrupted.cells()
    stops = now = 0
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(now))
    for allowed in range(10):

        def report(fraction: float, **values: float) -> None:
            nonlocal left, now
            left -= 1
            now += 1
            if left < 0:
                raise InterruptedError

        left, began = allowed, now
        try:
            (row,) = interrupted.run_cell(cell, report)
            break
        except InterruptedError:
            stops += 1
    assert stops >= 3
    assert row["wall_seconds"] > now - began, "the time of all sessions, not only of the last"
    kept = without_volatile(json.loads(json.dumps(row)))
    assert kept == {key: value for key, value in without_volatile(expected).items() if key in kept}


def test_the_cost_of_a_cell_includes_all_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, peak = [100.0], [500]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.PeakMemory, "growth", lambda self: peak[0])
    first = Cost("cpu", tmp_path)
    now[0] += 30
    first.note_memory()
    first.save()
    now[0], peak[0] = 1000.0, 20  # killed; the next session only measures
    second = Cost("cpu", tmp_path)
    now[0] += 5
    second.note_memory()
    assert (second.wall_seconds, second.peak_memory_growth) == (35.0, 500)


def test_options_choose_a_part_of_the_profile_or_every_combination() -> None:
    def cells(**options: Any) -> list[dict[str, Any]]:
        found = LanguageModels(LmOptions(profile="full", corpus="python-docs", **options).config()).cells()
        return [cell.settings for cell in found]

    assert len(cells(seeds=(42, 43, 44))) == 20
    assert {c["arm"] for c in cells(seeds=(45,))} == {"delta-l2", "exact-flow"}
    assert len(cells(arms=("delta-l2", "exact-flow"))) == 10
    assert len(cells(arms=("delta-l2", "exact-flow"), lr_sweep=True)) == 14
    assert [(c["arm"], c["seed"]) for c in cells(arms=("mamba2",), seeds=(45,))] == [("mamba2", 45)]
    assert {c["rate"] for c in cells(rates=(5e-4,))} == {5e-4}


def test_zero_shot_accuracy_is_not_testable_at_this_size() -> None:
    rows = made_up({"exact-flow": [2.0, 2.01, 2.02], "delta-l2": [2.2, 2.21, 2.22]})
    for row in rows:
        row["lambada"]["accuracy"] = 0.5 if row["arm"] == "exact-flow" else 0.1
    (claim,) = (claim for claim in claims.claims(rows) if claim.letter == "d")
    assert claim.verdict == "not testable here" and claim.difference is None and "340M" in claim.reason


def test_a_killed_cell_resumes_from_its_checkpoint_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = tiny(steps=60, validate_every=30)
    script = f"""
import os, signal, sys, json; from pathlib import Path
from efla.data.sampling import RowSampler; from efla.experiments.runner import run
from efla.runs.records import from_record; from efla.experiments.lm.config import LmConfig
from efla.experiments.lm.run import LanguageModels
folder, batch = Path(sys.argv[2]), RowSampler.batch
def killed_after_a_checkpoint(*arguments):
    if list((folder / {IN_PROGRESS!r}).glob("*/step-*")):
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(*arguments)
RowSampler.batch = killed_after_a_checkpoint
run(LanguageModels(from_record(LmConfig, json.loads(sys.argv[1]))), folder, executor="inline")
"""
    folder = tmp_path / "killed"
    assert run_fresh(script, json.dumps(to_record(config)), folder).returncode == -signal.SIGKILL
    assert not (folder / "rows.jsonl").exists()
    (saved,) = (folder / IN_PROGRESS).glob("*/step-*")
    assert 0 < int(saved.name.removeprefix("step-")) < 60
    config = dataclasses.replace(config, save_seconds=1e9)
    steps = []
    original = RowSampler.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowSampler, "batch", lambda self, step: steps.append(step) or original(self, step))
        run(LanguageModels(config), folder, executor="inline", console=QUIET)
    assert steps[0] >= 1
    assert steps[-1] == 59
    assert not (folder / IN_PROGRESS).exists()
    run(LanguageModels(config), tmp_path / "whole", executor="inline", console=QUIET)
    (a,), (b,) = read_rows(folder), read_rows(tmp_path / "whole")
    assert without_volatile(a) == without_volatile(b)


def test_steps_that_are_not_finite_count_the_run_as_failed_and_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from efla.train.step import StepResult

    monkeypatch.setattr(module, "train_step", lambda *a, **k: StepResult(loss=float("nan"), norm=1.0, applied=False))
    config, corpus = tiny(steps=30, max_nonfinite=5), corpora.load("python-docs")
    subject = Subject(build(config, "delta-raw", 42), "delta-raw", 42, corpus, config)
    row = train(subject, 2e-3, nothing).summary(config)
    assert (row["steps"], row["nonfinite_steps"], row["first_nonfinite"], row["failed"]) == (5, 5, 1, True)


def test_test_bits_are_those_of_rows_scored_one_by_one(tmp_path: Path) -> None:
    config, corpus = tiny(), corpora.load("python-docs")
    model = build(config, "exact-flow", 0).eval()
    subject = Subject(model, "exact-flow", 0, corpus, config)
    found = measurements(subject)["test"](subject)
    assert config.test_bytes is not None
    text = corpus.test[: config.test_bytes].tolist()
    rows = [text[i : i + config.length] for i in range(0, len(text), config.length)]
    requests = [Request(row, len(row) - 1) for row in rows if len(row) > 1]
    assert found["bytes"] == sum(request.num_scored for request in requests)
    nats = -sum(value.log_prob for value in score(model, requests)) / found["bytes"]
    assert found["bits"] == pytest.approx(nats / math.log(2), rel=1e-6)


def test_key_energies_are_those_of_the_keys_that_the_scan_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import efla.layers.attention as attention

    model = build(tiny(), "exact-flow", 0).eval()
    rows = torch.randint(1, 256, (2, 32))
    seen = []
    original = attention.scans.linear_attention

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, *a: Any, **kw: Any) -> Any:
        lam = k.double().square().sum(-1)
        seen.append([np.quantile(values.detach().numpy(), (0.5, 0.99, 1.0)) for values in (lam, beta * lam)])
        return original(q, k, v, beta, *a, **kw)

    monkeypatch.setattr(attention.scans, "linear_attention", look)
    found = key_energies(model, rows)
    assert len(found) == len(seen) == sum(isinstance(m, LinearAttention) for m in model.modules())
    for record, (lam, step_size) in zip(found, seen, strict=True):
        assert record["lam"] == pytest.approx(lam, rel=1e-4)
        assert record["step_size"] == pytest.approx(step_size, rel=1e-4)


def made_up(bits: dict[str, list[float]], **fields: Any) -> list[dict[str, Any]]:
    """Rows of runs with the given test bits, one for each seed."""
    rows = []
    for arm, values in bits.items():
        for seed, value in enumerate(values, start=42):
            row = {
                "row": "cell", "cell": f"{arm} {seed}", "arm": arm, "rate": 2e-3, "seed": seed, "failed": False,
                "profile": "quick", "parameters": 1, "backend": "native", "steps": 8, "bytes_seen": 512,
                "test": {"bits": value, "perplexity": 2**value, "bytes": 100},
                "validation": {"bits": value, "perplexity": 2**value, "bytes": 9},
                "losses": [[4, 3.0], [8, 2.5]], "validations": [[4, 3.0], [8, value]], "nonfinite_steps": 0,
                "largest_step_sizes": [[4, 1.0], [8, 1.5]] if arm == "exact-flow" else [],
                "wikitext": {"word_perplexity": 100 * value, "bits": value, "words": 10, "articles": 1},
                "lambada": {"perplexity": 1000 * value, "accuracy": 0.01, "bits": value, "passages": 10},
                "data": {"corpus": "shakespeare", "source": "x", "digest": "d", "train": 10, "test": 10},
                "config": to_record(tiny()) | {"downstream": True}, "rows": 1, "threads": 1, "wall_seconds": 1.0,
                "timing": {"train_seconds": 1.0, "steps_per_second": 8.0, "bytes_per_second": 512.0, "peak_memory_growth": 10**6},
                "started": "2026-01-01T00:00:00", "versions": {}, "commit": None, "machine": {}, **fields,
            }  # fmt: skip
            rows.append(row)
    return rows


def test_seeds_are_compared_pair_by_pair() -> None:
    def verdicts(ours: list[float], theirs: list[float]) -> set[str]:
        found = claims.claims(made_up({"exact-flow": ours, "delta-l2": theirs}))
        return {claim.verdict for claim in found if claim.letter == "a"}

    assert verdicts([2.0, 2.1, 2.2], [2.05, 2.15, 2.15]) == {"not seen"}
    assert verdicts([2.0, 2.1, 2.2], [2.05, 2.15, 2.25]) == {"seen"}, "what seeds share drops out"
    assert verdicts([2.2, 2.21, 2.22], [2.0, 2.01, 2.02]) == {"reversed"}
    assert verdicts([2.0], [2.5]) == {"not judged"}


def test_a_failed_run_is_a_worse_result_not_a_missing_one() -> None:
    rows = made_up({"exact-flow": [2.0, 2.01, 2.02], "delta-l2": [1.0, 1.01, 1.02]})
    next(row for row in rows if row["arm"] == "delta-l2")["failed"] = True
    assert claims.Runs(rows).metric("delta-l2", "bits").n == 3
    first = claims.claims(rows)[0]
    assert first.difference is not None and (first.difference.won, first.difference.lost) == (1, 2)
    assert first.verdict == "not seen", "no interval; one pair of three in a sign test"
    assert "DeltaNet: 1 failed" in claims.text_summary(rows)


def test_arms_are_compared_on_the_seeds_they_share() -> None:
    rows = made_up({"exact-flow": [2.0, 3.0, 4.0], "delta-raw": [2.5]})
    (claim,) = (claim for claim in claims.claims(rows) if "DeltaNet (raw keys)" in claim.pair)
    assert claim.difference is not None and claim.difference.mean == pytest.approx(0.5), "fewer bits are better"
    assert claim.reason == "2.0000 against 2.5000; 2 unpaired seeds left out"
    assert claim.verdict == "not judged"


def test_perplexities_are_compared_in_percent_beside_the_papers() -> None:
    rows = made_up({"exact-flow": [1.8, 1.9], "delta-l2": [2.0, 2.0]})
    wikitext = next(claim for claim in claims.claims(rows) if claim.pair == "WikiText")
    assert wikitext.difference is not None and wikitext.difference.mean == pytest.approx(7.5)
    assert wikitext.paper == pytest.approx(100 * (1 - 35.26 / 38.09))
    assert wikitext.unit == "%"


def test_the_figure_is_drawn_from_rows_alone(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    rows = made_up({"exact-flow": [2.0, 2.1], "delta-l2": [2.0, 2.1], "attention": [2.2]})
    rows[0]["positions"] = {"ends": [64, 128], "bits": [2.5, 2.0], "standard_errors": [0.1, 0.1], "rows": 2}
    files = LanguageModels.plot(rows, tmp_path)
    assert [file.name for file in files] == ["lm.svg", "lm-dark.svg", "lm.png"]
    assert all(file.stat().st_size > 1000 for file in files)
