"""The benchmark of shared prefills runs, and reports nothing if a score differs. No test asserts a time."""

from __future__ import annotations

import json

import pytest

from efla import cli
from efla.bench import evaluation, gate
from tests.evaluation.small_data import write_small_data

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.setenv("EFLA_DATA", str(write_small_data(tmp_path / "data")))
    monkeypatch.setattr(evaluation, "MODELS", {"efla, bytes": {"rule": "efla", "vocab_size": 256}})
    monkeypatch.setattr(evaluation, "PLAIN_ROWS", (4,))
    monkeypatch.setattr(gate, "check_contenders", lambda: None)


def test_both_paths_are_timed(tmp_path, capsys):
    output = tmp_path / "rows.json"
    assert cli.main(["bench", "evaluation", "--rounds", "1", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["shared prefill", "plain, 4 rows"]
    assert all(row["median"] > 0 for row in rows)
    assert "HellaSwag" in capsys.readouterr().out


def test_a_wrong_score_gets_no_numbers(monkeypatch, capsys):
    shared = evaluation._call

    def wrong(lm, requests):
        call = shared(lm, requests)
        return (lambda: [(value + 1e-3, greedy) for value, greedy in call()]) if lm.share else call

    monkeypatch.setattr(evaluation, "_call", wrong)
    assert cli.main(["bench", "evaluation", "--rounds", "1"]) == 1
    assert "no speed is reported" in capsys.readouterr().err


def test_without_data_the_error_says_what_to_set(monkeypatch, capsys):
    monkeypatch.delenv("EFLA_DATA")
    assert cli.main(["bench", "evaluation", "--rounds", "1"]) == 1
    assert "set EFLA_DATA" in capsys.readouterr().err
