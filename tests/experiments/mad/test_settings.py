"""The settings of MAD: the sweep, which ones are refused, and the published files of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from efla.experiments.mad import tasks as mad
from efla.experiments.mad.tasks import TASKS, Setting, baseline, folder_name, generate, sweep
from tests.experiments.mad.files import write_published
from tests.experiments.mad.parse import IGN


def test_the_sweep_has_66_settings() -> None:
    assert {TASKS[task]: len(sweep(task)) for task in TASKS} == {
        "CR": 11,
        "FR": 11,
        "NR": 14,
        "SC": 13,
        "C": 11,
        "M": 6,
    }
    ids = [setting.id for task in TASKS for setting in sweep(task)]
    assert len(ids) == len(set(ids)) == 66
    fewer = ["train6400", "train3200", "train1600", "train800"]
    vocabularies, longer = ["V32", "V64", "V128"], ["L256", "L512", "L1024"]
    assert {TASKS[task]: [setting.name for setting in sweep(task)[1:]] for task in TASKS} == {
        "CR": [*vocabularies, *longer, *fewer],
        "FR": [*vocabularies, *longer, *fewer],
        "NR": ["V48", "V80", "V144", *longer, *fewer, "noise0.4", "noise0.6", "noise0.8"],
        "SC": [*vocabularies, "L512", "L1024", *fewer, "copy32", "copy64", "copy96"],
        "C": [*vocabularies, "L64", "L128", "L256", *fewer],
        "M": ["V512", "V1024", "V2048", "V4096", "V8192"],
    }
    assert {setting.noise_vocab_size for setting in sweep("noisy-in-context-recall")} == {16}


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_of_the_sweep_can_be_generated(task: str) -> None:
    for setting in sweep(task):
        data = generate(replace(setting, num_train_examples=3, num_test_examples=3))
        for inputs, targets in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
            assert inputs.shape == targets.shape == (3, setting.length)
            assert inputs.dtype == targets.dtype == torch.int64
            assert int(inputs.min()) >= 0 and int(inputs.max()) < setting.vocab_size
            assert int(targets.max()) < setting.vocab_size and bool((targets[targets != IGN] >= 0).all())


# Parameter, a value that is not its default, and the tasks that have it.
OPTIONS = [
    ("frac_noise", 0.5, ["in-context-recall", "noisy-in-context-recall"]),
    ("noise_vocab_size", 4, ["in-context-recall", "noisy-in-context-recall"]),
    ("k_motif_size", 3, ["fuzzy-in-context-recall"]),
    ("v_motif_size", 2, ["fuzzy-in-context-recall"]),
    ("num_tokens_to_copy", 8, ["selective-copying"]),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "in-context-recal"}, "in-context-recall"),
        ({"task": "in-context-recall", "seq_len": 7}, "even"),
        ({"task": "noisy-in-context-recall", "frac_noise": 0.5}, "noise_vocab_size"),
        ({"task": "noisy-in-context-recall", "noise_vocab_size": 8, "frac_noise": 1.0}, "frac_noise"),
        ({"task": "fuzzy-in-context-recall", "vocab_size": 4, "k_motif_size": 3}, "tokens without repeats"),
        ({"task": "fuzzy-in-context-recall", "k_motif_size": 3, "v_motif_size": 3, "seq_len": 12}, "at least 13"),
        ({"task": "selective-copying", "num_tokens_to_copy": 20, "seq_len": 41}, "exceed"),
        ({"task": "selective-copying"}, "num_tokens_to_copy"),
        ({"task": "memorization", "seq_len": 3}, "even"),
        ({"task": "compression", "num_test_examples": 0}, "at least 1"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**{"vocab_size": 17, "seq_len": 64, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("option", "value", "tasks"), OPTIONS, ids=[option for option, _, _ in OPTIONS])
def test_a_parameter_of_other_tasks_is_refused(task: str, option: str, value: float, tasks: list[str]) -> None:
    noise = {"noise_vocab_size": 4} if option == "frac_noise" and task in tasks else {}
    if task in tasks:
        assert getattr(replace(baseline(task), **{**noise, option: value}), option) == value
    else:
        with pytest.raises(
            ValueError, match=f"{task}: {option} is a parameter of {tasks[0]}.*no effect here, got {value}"
        ):
            replace(baseline(task), **{option: value})


def test_published_files_are_read_and_checked(tmp_path: Path) -> None:
    setting = replace(baseline("noisy-in-context-recall"), num_train_examples=6, num_test_examples=4)
    data = generate(setting, bit_exact=True)
    name = folder_name(setting)
    assert name == "t-NR_vs-32_sl-128_ntr-6_nte-4_km-1_vm-1_mq-1_fn-0#2_nvs-16_ntc-0_s-12345"
    assert write_published(tmp_path, data) == tmp_path / name
    found = mad.load(setting, tmp_path)
    assert found.digest() == data.digest()
    assert found.source.startswith("files of t-NR")
    with pytest.raises(FileNotFoundError, match="holds no data for in-context-recall"):
        mad.load(baseline("in-context-recall"), tmp_path)
    np.save(tmp_path / name / "test" / "inputs.npy", np.zeros((4, 128), dtype=np.int64))
    with pytest.raises(ValueError, match="4 x 127 tokens"):
        mad.load(setting, tmp_path)
    np.save(tmp_path / name / "test" / "inputs.npy", np.full((4, 127), 99))
    with pytest.raises(ValueError, match="tokens 0 to 31"):
        mad.load(setting, tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        mad.load(setting, tmp_path / "absent")
