"""``efla mad show``: kinds of tokens, targets below their positions, errors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from efla import cli
from efla.experiments.mad.show import instance_lines, token_kind
from efla.experiments.mad.tasks import TASKS, baseline, generate


def _numbers(text: str, label: str) -> list[str]:
    return [token for line in re.findall(rf"^{label} +(.*)$", text, re.MULTILINE) for token in line.split()]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("training", [False, True])
def test_an_instance_is_printed_with_each_target_below_its_position(
    task: str, training: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["mad", "show", task, "--index", "2", *(["--training"] if training else [])]) == 0
    text = capsys.readouterr().out
    counts = (
        {"num_train_examples": 3, "num_test_examples": 1}
        if training
        else {"num_train_examples": 1, "num_test_examples": 3}
    )
    data = generate(replace(baseline(task), **counts), bit_exact=True)  # type: ignore[arg-type]
    inputs, targets = (data.train_inputs, data.train_targets) if training else (data.test_inputs, data.test_targets)
    assert _numbers(text, "input") == [str(token) for token in inputs[2].tolist()]
    assert _numbers(text, "target") == ["·" if t == -100 else str(t) for t in targets[2].tolist()]
    assert ("every next token" in text) == (training and "recall" in task)


def test_targets_and_kinds_of_tokens_have_their_own_colours() -> None:
    setting = baseline("in-context-recall")
    lines = instance_lines(setting, [1, 9, 1], [-100, -100, 9], 80)
    styles = [{str(span.style) for span in line.spans} for line in lines[:3]]
    assert styles[1] == {"bold cyan", "green"}
    assert "bold black on bright_yellow" in styles[2]


@pytest.mark.parametrize(
    ("task", "kinds"),
    [
        ("noisy-in-context-recall", {0: "key", 7: "key", 8: "value", 15: "value", 16: "noise", 31: "noise"}),
        ("fuzzy-in-context-recall", {6: "key", 7: "value", 14: "value", 15: "pad"}),
        ("selective-copying", {13: "content", 14: "blank", 15: "marker"}),
        ("compression", {14: "content", 15: "marker"}),
        ("memorization", {126: "key", 127: "value", 254: "value", 255: "marker"}),
    ],
)
def test_tokens_are_what_the_layout_says(task: str, kinds: dict[int, str]) -> None:
    assert {token: token_kind(baseline(task), token) for token in kinds} == kinds


def test_an_impossible_setting_is_an_error_that_says_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mad", "show", "selective-copying", "--seq-len", "20"]) == 1
    assert "seq_len must exceed 2 * 16 + 1" in capsys.readouterr().err
    assert cli.main(["mad", "show", "compression", "--index", "-1"]) == 1
    assert cli.main(["mad", "show", "compression", "--frac-noise", "0.5"]) == 1
    assert "frac_noise is a parameter of in-context-recall and noisy-in-context-recall" in capsys.readouterr().err
    assert cli.main(["mad", "show", "memorization", "--guarantee-probe"]) == 1
    assert "--guarantee-probe is an option of fuzzy-in-context-recall" in capsys.readouterr().err
