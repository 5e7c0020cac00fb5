"""No work is lost: killed, preempted or interrupted, a run ends as the undisturbed one, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from efla import interruption
from efla.data import prepare
from efla.data.shards import is_prepared
from efla.train import checkpoint, loop
from efla.train.checkpoint import Checkpoints, verify
from efla.train.engine import Engine
from efla.train.output import open_output, read_metrics
from tests.processes import started, wait_for_line
from tests.train.small import SIZES, assert_same, losses, numbers, small, tensors

DRIVER = Path(__file__).with_name("kill_driver.py")


@pytest.mark.parametrize("saving", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_while_saving_a_run_ends_the_same(saving, tmp_path):
    loop.run(small(steps=40, save_every=4, async_save=saving == "async"), tmp_path / "whole")
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path / "killed"), "7", saving],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "killed")
    assert_same(tensors(tmp_path / "whole", 40), tensors(tmp_path / "killed", 40))
    assert not list((tmp_path / "killed" / "checkpoints").glob(".step-*"))


def test_stopped_and_continued_is_the_same_as_never_stopped(tmp_path):
    """With documents reset, micro-batches, and the random numbers of torch, numpy and Python in the checkpoint."""
    changes = {"documents": "reset", "order": "shuffled", "micro_rows": 2}
    loop.run(small(**changes), tmp_path / "whole")
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    outcome = loop.run(small(**changes, stop_after=5), tmp_path / "parts")
    assert (outcome.steps, outcome.exit_code, outcome.finished) == (5, 0, False)
    state = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    run = loop.Run(small(**changes), tmp_path / "parts", Engine.alone(), None)
    assert run.step == 5
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == state
    run.metrics.close()
    assert loop.run(small(**changes), tmp_path / "parts").finished
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    assert_same(tensors(tmp_path / "whole", 12), tensors(tmp_path / "parts", 12))


def test_a_signal_saves_and_exits_with_its_code(tmp_path):
    command = [sys.executable, "-m", "efla", "train", "--output", str(tmp_path), "--save-every", "0"]
    command += ["--validate-every", "2", "--validation-tokens", "500", "--set", *SIZES]
    with started(command) as process:
        wait_for_line(process, "step 2: validation loss")  # of 300
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert process.returncode == 75, output
    assert "the same command resumes" in output
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert json.loads((saved / "state.json").read_text())["step"] == len(losses(tmp_path))
    assert read_metrics(tmp_path)[-1]["why"] == "SIGTERM"


SIGNALS = pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
    ids=["SIGTERM", "SIGUSR1", "SIGINT"],
)


# Python runs this at its start, before anything else: the process sends itself the signal when it imports a module.
SIGNAL_AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, *ignored):
        if name == os.environ["SIGNAL_AT"]:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", ["torch", pytest.param("efla.train.loop", marks=pytest.mark.slow)])
@SIGNALS
def test_a_signal_before_the_run_exits_with_its_code_and_leaves_nothing(number, code, module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_IMPORT)
    environment = {"PYTHONPATH": str(tmp_path), "SIGNAL_AT": module, "SIGNAL": str(int(number))}
    command = [sys.executable, "-m", "efla", "train", "--output", str(tmp_path / "run")]
    with started(command, env=environment) as process:
        output, _ = process.communicate()
    assert process.returncode == code, output
    assert output == f"efla train: stopped by {number.name} outside training; the same command starts it again\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("owner", "function", "steps"),
    [
        (prepare._Writer, "write", 0),
        (loop.Run, "_build_model", 0),
        (Checkpoints, "load", 6),
        (loop, "train_step", 1),
    ],
    ids=["preparing", "building", "resuming", "training"],
)
@SIGNALS
def test_a_signal_at_any_moment_keeps_what_was_done_and_no_more(
    number, code, owner, function, steps, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("some text, " * 200)
    config = small(data=str(tmp_path / "a.txt"))
    loop.run(config, tmp_path / "whole")
    if function == "load":
        loop.run(small(data=config.data.data, stop_after=6), tmp_path / "run")
    original = getattr(owner, function)

    def signalled(*args, **kwargs):
        signal.raise_signal(number)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, function, signalled)
        outcome = loop.run(config, tmp_path / "run", console=Console())
    assert (outcome.exit_code, outcome.steps, outcome.finished) == (code, steps, False)
    assert f"stopped by {number.name}" in capsys.readouterr().out
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("*"))
    assert kept == {0: [], 1: [1], 6: [3, 6]}[steps]
    assert is_prepared(tmp_path / "run" / "data") == (function != "write")
    assert loop.run(config, tmp_path / "run").finished
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert_same(tensors(tmp_path / "run", 12), tensors(tmp_path / "whole", 12))


@pytest.mark.parametrize("is_signalled", [True, False])
def test_workers_that_a_signal_ended_too_are_no_error(is_signalled, tmp_path, monkeypatch):
    """A scheduler sends the signal to all processes; a worker that dies for another reason is an error."""

    def die(*args, **kwargs):
        if is_signalled:
            signal.raise_signal(signal.SIGTERM)
        raise BrokenProcessPool("a worker died")

    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr(loop, "prepare", die)
    expected = nullcontext() if is_signalled else pytest.raises(BrokenProcessPool)
    with expected:
        assert loop.run(small(data=str(tmp_path / "a.txt")), tmp_path / "run").exit_code == 75


def test_only_the_command_itself_listens_from_its_start(monkeypatch):
    """Not a program that imports efla, nor a worker process, which is given its parent's sys.argv."""

    def listens(original, given):
        monkeypatch.setattr(sys, "orig_argv", original)
        monkeypatch.setattr(sys, "argv", given)
        return interruption._is_command("train")

    assert listens(["python", "-u", "-m", "efla", "train", "--steps", "1"], ["-m", "train", "--steps", "1"])
    assert listens(["python", "/bin/efla", "train"], ["/bin/efla", "train"])
    assert not listens(["python", "/bin/efla", "eval", "train"], ["/bin/efla", "eval", "train"])
    assert not listens(["python", "mine.py", "train"], ["mine.py", "train"])
    assert not listens(["python", "-c", "spawn_main(...)", "--multiprocessing-fork"], ["/bin/efla", "train"])
    assert not listens(["python"], [""])


def test_checkpoints_are_kept_by_policy(tmp_path):
    loop.run(small(save_every=1, keep=2, keep_every=5), tmp_path)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000005",
        "step-00000010",
        "step-00000011",
        "step-00000012",
    ]


def test_a_finished_run_is_finished_again_at_once(tmp_path):
    loop.run(small(), tmp_path)
    before = losses(tmp_path)
    assert loop.run(small(), tmp_path).finished
    assert losses(tmp_path) == before


def test_large_checkpoints_are_cut_into_files_and_read_back(tmp_path, monkeypatch):
    loop.run(small(), tmp_path / "whole")
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 20_000)
    loop.run(small(stop_after=6), tmp_path / "cut")
    assert len(list((tmp_path / "cut" / "checkpoints" / "step-00000006").glob("*.safetensors"))) > 5
    monkeypatch.undo()
    loop.run(small(), tmp_path / "cut")
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert_same(tensors(tmp_path / "whole", 12), tensors(tmp_path / "cut", 12))


def test_an_asynchronous_save_holds_the_weights_of_its_step(tmp_path):
    for name in ("sync", "async"):
        loop.run(small(async_save=name == "async", keep=9), tmp_path / name)
    for step in (3, 6, 9, 12):
        assert_same(tensors(tmp_path / "sync", step), tensors(tmp_path / "async", step))


@pytest.mark.parametrize("damage", ["byte", "cut", "missing", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_left(damage, tmp_path):
    loop.run(small(stop_after=6), tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006"
    (file,) = newest.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "byte":
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-7])
    elif damage == "missing":
        (newest / "state.json").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    assert verify(newest) is not None
    with pytest.raises(
        ValueError, match=r"step-00000006 is damaged: .*Remove that folder to resume from the one before"
    ):
        loop.run(small(), tmp_path)
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert loop.run(small(), tmp_path).finished  # from step 3


def test_another_config_is_refused_and_told_the_difference(tmp_path):
    loop.run(small(stop_after=3), tmp_path)
    with pytest.raises(
        ValueError, match=r"another config \(peak_rate: 0.002 there, 0.003 now; seed: 42 there, 43 now\)"
    ):
        loop.run(small(peak_rate=3e-3, seed=43), tmp_path)
    # What does not change the run may change.
    assert loop.run(small(save_every=0, validate_every=0, micro_rows=2, keep=1), tmp_path).finished


def test_another_checkpoint_or_another_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text, " * 200)
    loop.run(small(data=str(tmp_path / "a.txt"), stop_after=3), tmp_path / "run")
    loop.run(small(data=str(tmp_path / "a.txt"), steps=13, stop_after=6), tmp_path / "other")
    (tmp_path / "other" / "checkpoints" / "step-00000006").rename(tmp_path / "run" / "checkpoints" / "step-00000006")
    with pytest.raises(ValueError, match=r"another config \(steps: 13 there, 12 now\)"):
        loop.run(small(data=str(tmp_path / "a.txt")), tmp_path / "run")
    for kept in (tmp_path / "other" / "data").iterdir():
        kept.unlink()
    (tmp_path / "a.txt").write_text("another text, " * 200)
    with pytest.raises(ValueError, match="has changed since"):
        loop.run(small(data=str(tmp_path / "a.txt"), steps=13), tmp_path / "other")


def test_a_model_of_another_shape_does_not_load(tmp_path):
    engine = Engine.alone()
    loop.run(small(stop_after=3), tmp_path / "a")
    (tmp_path / "b").mkdir()
    run = loop.Run(small(set=(*small().model.set, "hidden_size=48")), tmp_path / "b", engine, None)
    path = tmp_path / "a" / "checkpoints" / "step-00000003"
    with pytest.raises(ValueError, match="does not fit this model"):
        Checkpoints(tmp_path, engine).load(path, run.model, run.optimizer)


def test_a_full_disk_ends_a_save_with_advice_and_keeps_the_one_before(tmp_path, monkeypatch):
    true_write = checkpoint._write

    def full(tensors, writer, group):
        if "00000006" in str(writer.path):
            raise OSError(28, "No space left on device")
        return true_write(tensors, writer, group)

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(OSError, match=r"the disk is full\. Make room and run the same command"):
        loop.run(small(), tmp_path)
    monkeypatch.undo()
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000003"]
    assert loop.run(small(), tmp_path).finished
    loop.run(small(), tmp_path.with_name("undisturbed"))
    assert numbers(tmp_path) == numbers(tmp_path.with_name("undisturbed"))


def test_a_folder_that_is_not_a_runs_or_is_taken_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis\.txt but no config\.json of a run; nothing was changed"):
        loop.run(small(), tmp_path)
    with (
        open_output(tmp_path / "taken", small()),
        pytest.raises(RuntimeError, match="another run is writing to"),
    ):
        loop.run(small(), tmp_path / "taken")


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": "no-such-corpus"},
        {"data": "novels", "data_root": "empty"},
        {"data": "lines.jsonl", "column": "body"},
    ],
    ids=lambda wrong: "-".join(wrong.values()),
)
def test_a_folder_is_free_for_the_corrected_command_after_inputs_were_refused(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "lines.jsonl").write_text('{"text": "%s"}\n' % ("some text " * 400))
    with pytest.raises((ValueError, OSError)):
        loop.run(small(**wrong), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
    assert loop.run(small(data="lines.jsonl"), tmp_path / "run").finished
