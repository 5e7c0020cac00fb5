"""Verdicts on the claims about sequential MNIST follow from the rows."""

from __future__ import annotations

import math
from collections.abc import Callable

from efla.experiments.smnist.claims import Condition, corruption_claims, rate_claims, runs_of
from efla.experiments.smnist.config import MAIN_ARMS
from efla.runs.records import Record

LEVELS = {"dropout": (0, 0.2, 0.4), "scale": (1, 4, 16), "noise": (0, 0.1, 0.4)}
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def made_up_rows(
    accuracy: Callable[[str, str, float, int], float],
    clean: Callable[[str, float, int], float] = lambda arm, rate, seed: 0.9,
    loss: Callable[[str, float, int], float] = lambda arm, rate, seed: 0.3,
    seeds: tuple[int, ...] = (0, 1, 2),
) -> list[Record]:
    """Rows as the experiment writes them, with made-up numbers."""
    rows: list[Record] = []
    for arm in MAIN_ARMS:
        for rate in RATES:
            for seed in seeds:
                about = {"cell": f"{arm} {rate} {seed}", "block": "bare", "arm": arm, "rate": rate, "seed": seed}
                for kind, levels in LEVELS.items():
                    if rate == 3e-3:
                        rows += [
                            {**about, "row": "level", "kind": kind, "level": level, "retention": 1.0, "nonfinite": 0.0,
                             "median_step_size": 1.0, "largest_step_size": 2.0, "accuracy": accuracy(arm, kind, level, seed)}
                            for level in levels
                        ]  # fmt: skip
                final = loss(arm, rate, seed)
                rows.append(
                    {**about, "row": "cell", "experiment": "smnist", "losses": [2.0, 1.0, 0.5], "final_loss": final,
                     "clean_accuracy": clean(arm, rate, seed), "clean_images": 1000, "parameters": 68298, "clip_share": 0.1,
                     "diverged": math.isnan(final), "diverged_at": None, "largest_step_size": 1.0, "backend": "chunked",
                     "timing": {"images_per_second": 100.0, "scan_share": 0.5}, "wall_seconds": 10.0, "threads": 1,
                     "started": "2026-01-01T00:00:00", "versions": {"efla": "0"}, "commit": None, "machine": {},
                     "data": {"description": "made-up <images>", "digest": "0", "source": "idx", "train": 60000, "test": 10000},
                     "config": {"steps": 3, "batch": 128, "length": 784}}
                )  # fmt: skip
    return rows


def test_claims_a_and_b_are_judged_apart_and_per_pair() -> None:
    def accuracy(arm: str, kind: str, level: float, seed: int) -> float:
        worse = {("delta-raw", "scale"): 0.3, ("exact-flow", "noise"): 0.2, ("delta-l2", "scale"): 0.005}
        drop = worse.get((arm, kind), 0.0) if level > 1 or kind == "noise" else 0.0
        return 0.9 - drop + 0.02 * seed

    found = {(c.sentence.split()[-1], c.pair.split()[2]): c for c in corruption_claims(made_up_rows(accuracy))}
    assert found["higher", "delta-raw"].verdict == "seen"
    assert found["higher", "delta-l2"].verdict == "not seen"
    assert found["noise", "delta-raw"].verdict == "reversed"
    assert found["dropout", "delta-l2"].verdict == "not seen"
    assert "seen at 2" in found["higher", "delta-raw"].reason
    assert "3 seeds" in found["higher", "delta-raw"].reason


def test_one_seed_gives_numbers_but_no_verdict() -> None:
    rows = made_up_rows(lambda arm, kind, level, seed: 0.9 if arm == "exact-flow" else 0.1, seeds=(0,))
    for claim in [*corruption_claims(rows), *rate_claims(rows)]:
        assert claim.verdict == "not judged"
        assert "no verdict" in claim.reason


def _noise(seed: int) -> float:
    return 0.002 * seed


def test_claims_about_rates_are_seen_when_all_they_say_holds() -> None:
    rows = made_up_rows(
        lambda arm, kind, level, seed: 0.9,
        clean=lambda arm, rate, seed: (0.8 + 10 * rate if arm == "exact-flow" else 0.7) + _noise(seed),
        loss=lambda arm, rate, seed: (0.2 if arm == "exact-flow" else 0.5) + _noise(seed),
    )
    assert {(claim.letter, claim.verdict) for claim in rate_claims(rows)} == {(x, "seen") for x in "cde"}


def test_claim_d_is_not_seen_when_one_rate_disagrees_and_e_is_reversed_when_roles_are_swapped() -> None:
    def clean(arm: str, rate: float, seed: int) -> float:
        if arm == "exact-flow":
            return 0.8 + _noise(seed)
        return (0.9 if rate == 1e-2 else 0.7) + _noise(seed)

    verdicts = {claim.letter: claim.verdict for claim in rate_claims(made_up_rows(lambda *_: 0.9, clean=clean))}
    assert verdicts == {"c": "seen", "d": "not seen", "e": "reversed"}


def test_a_diverged_run_counts_against_its_arm_and_is_mentioned() -> None:
    rows = made_up_rows(
        lambda arm, kind, level, seed: 0.0 if arm == "delta-raw" else 0.9 + _noise(seed),
        loss=lambda arm, rate, seed: math.nan if arm == "delta-raw" and seed == 1 else 0.3,
    )
    scale = next(c for c in corruption_claims(rows) if c.letter == "a" and "delta-raw" in c.pair)
    assert scale.verdict == "seen"
    assert "delta-raw diverged in training in 1 of 3 runs" in scale.reason
    point = runs_of(rows, Condition("bare", 3e-3), "delta-raw").spread("final_loss")
    assert math.isnan(point.mean)
    assert point.n == 3
