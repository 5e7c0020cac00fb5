"""The exactness study measures what the rules declare."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from efla import rules
from efla.experiments.exactness.claims import by_study, table
from efla.experiments.exactness.config import RULES, profile
from efla.experiments.exactness.run import Exactness, by_matrix_exponential, in_closed_form
from efla.experiments.runner import run
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.rows import read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("exactness")
    config = dataclasses.replace(profile("quick"), draws=3, seeds=3)
    run(Exactness(config), where, executor="inline", console=Console(quiet=True))
    return where


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Record]:
    return read_rows(folder)


@pytest.mark.parametrize("rule", RULES)
def test_the_closed_form_of_the_flow_is_the_matrix_exponential(rule: str) -> None:
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(8, 5, 4, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (5, 4))
    beta = torch.rand(8, generator=generator, dtype=torch.float64)
    gate = torch.log(torch.rand(8, generator=generator, dtype=torch.float64)) if rules.get(rule).needs_gate else None
    rates = rules.get(rule).flow(beta, gate)
    torch.testing.assert_close(
        in_closed_form(rates, state, k, v), by_matrix_exponential(rates, state, k, v), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_measured_order_is_the_declared_one(rows: list[Record], rule: str) -> None:
    row = by_study(rows, "order")[rule]
    declared, measured = number(row["declared_order"]), number(row["measured_order"])
    assert measured == declared if math.isinf(declared) else abs(measured - declared) <= 0.1
    if math.isinf(declared):
        assert max(number(error) for error in row["error"]) < 1e-12


def test_the_stability_limits_are_those_of_the_textbook(rows: list[Record]) -> None:
    limits = {rule: number(row["stability_limit"]) for rule, row in by_study(rows, "stability").items()}
    assert limits["delta"] == pytest.approx(2)
    assert limits["rk2"] == pytest.approx(2)
    assert limits["rk4"] == pytest.approx(2.785293563405282)
    assert limits["gated_delta"] == pytest.approx(1 + 1 / 0.99)
    assert all(math.isinf(limits[rule]) == rules.get(rule).contractive for rule in RULES)


def test_a_burst_of_energetic_keys_blows_up_the_euler_memory_and_no_contractive_one(rows: list[Record]) -> None:
    for rule, row in by_study(rows, "memory").items():
        growth = number(row["norm_after_burst"]) / number(row["norm_before_burst"])
        assert growth < 2 if rules.get(rule).contractive else growth > 50


def test_figure_and_table_come_from_rows_alone(rows: list[Record], tmp_path: Path) -> None:
    pytest.importorskip("altair")
    files = Exactness.plot(rows, tmp_path)
    assert [file.name for file in files] == ["exactness.svg", "exactness-dark.svg", "exactness.png"]
    assert all(file.stat().st_size > 10_000 for file in files)
    first = files[0].read_bytes()
    assert Exactness.plot(rows, tmp_path)[0].read_bytes() == first, "the same rows give the same figure"
    assert [line["rule"] for line in table(rows)] == [name_of(rule) for rule in RULES]
    assert "Gated EFLA (log gate)" in Exactness.text_summary(rows)


def test_unknown_profiles_and_rules_are_errors_that_offer_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown profile 'ful'.*'full'"):
        profile("ful")
    with pytest.raises(ValueError, match=r"unknown rule 'eflaa'.*'efla'"):
        Exactness(dataclasses.replace(profile("quick"), rules=("eflaa",))).cells()


def test_the_table_of_the_documentation_is_that_of_the_committed_rows() -> None:
    root = Path(__file__).parents[3]
    lines = table(read_rows(root / "results" / "exactness-full"))
    page = (root / "docs" / "results" / "exactness.md").read_text()
    assert len(lines) == len(RULES)
    for line in lines:
        assert "| " + " | ".join(line.values()) + " |" in page
