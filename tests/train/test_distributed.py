"""Two and four processes over gloo compute what one does, and read each other's checkpoints."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from efla.train import loop
from efla.train.config import MachineOptions
from efla.train.engine import check_layout
from efla.train.output import read_metrics
from tests.processes import children, started, wait_for_line
from tests.train.ranks import run_ranks
from tests.train.small import SIZES, losses, small


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process that all others are held to."""
    folder = tmp_path_factory.mktemp("alone")
    loop.run(small(documents="reset"), folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """Runs of two processes: ddp, fsdp, hsdp with micro-batches and a checkpoint in between; see rank_checks.py."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks("train_runs", 2, folder, folder=folder)
    return folder


@pytest.mark.parametrize("name", ["ddp", "ddp-async", "ddp-checkpointing", "fsdp", "fsdp-micro", "hsdp"])
def test_two_ranks_have_the_losses_and_weights_of_one(name, alone, two_ranks):
    assert losses(two_ranks / name) == pytest.approx(losses(alone), abs=1e-5)
    norms = [[r["norm"] for r in read_metrics(f) if r["event"] == "step"] for f in (two_ranks / name, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (two_ranks / name, alone))
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-5)
    validations = [
        [r["loss"] for r in read_metrics(f) if r["event"] == "validation"] for f in (two_ranks / name, alone)
    ]
    assert validations[0] == pytest.approx(validations[1], abs=1e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_stopped_and_continued_are_bit_identical_to_undisturbed(name, two_ranks):
    assert losses(two_ranks / f"{name}-stopped") == losses(two_ranks / name)
    ours, theirs = (load_file(two_ranks / f / "model" / "model.safetensors") for f in (f"{name}-stopped", name))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_rows_split_over_two_ranks_train_as_whole_rows(two_ranks, tmp_path):
    loop.run(small(), tmp_path)
    assert losses(two_ranks / "sequence") == pytest.approx(losses(tmp_path), abs=1e-5)


def test_a_checkpoint_moves_from_two_ranks_to_one_and_back(alone, two_ranks):
    """Steps 1 to 4 sharded over two ranks, 5 to 8 on one, the rest on two again: the losses of one process throughout."""
    folder = two_ranks / "moving"
    assert sorted(p.name for p in (folder / "checkpoints" / "step-00000004").glob("*.safetensors")) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    assert losses(folder) == pytest.approx(losses(alone), abs=1e-5)
    starts = [(row["step"], row["world"]) for row in read_metrics(folder) if row["event"] == "start"]
    assert starts == [(0, 2), (4, 1), (8, 2)]


@pytest.mark.slow
def test_a_checkpoint_moves_from_four_ranks_to_one_to_two(alone, tmp_path):
    folder = tmp_path / "moving"
    run_ranks("train_first", 4, tmp_path, folder=folder)
    loop.run(small(documents="reset", stop_after=8, keep=9), folder)
    run_ranks("train_rest", 2, tmp_path, folder=folder)
    assert losses(folder) == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.slow
def test_four_ranks_in_two_sharded_groups_have_the_losses_of_one(alone, tmp_path):
    run_ranks("train_hybrid", 4, tmp_path, folder=tmp_path / "hybrid")
    assert losses(tmp_path / "hybrid") == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_without_torchrun_may_be_wrapped_too(strategy, alone, tmp_path):
    loop.run(small(documents="reset", strategy=strategy), tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-5)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "efla", "train", "--output", str(tmp_path), "--steps", "60", "--save-every", "5"]
    command += ["--validate-every", "5", "--validation-tokens", "500", "--strategy", "fsdp", "--device", "cpu"]
    with started([*command, "--set", *SIZES]) as process:
        wait_for_line(process, "step 15: validation loss")  # and the checkpoint of step 10 is saved
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    rows = read_metrics(tmp_path)
    starts = [row["step"] for row in rows if row["event"] == "start"]
    assert len(starts) == 2 and starts[1] >= 10
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 61))
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"strategy": "single"}, "'single' is for one process, but torchrun started 4"),
        ({"strategy": "hsdp", "shard_size": 3}, r"--shard-size, .* divisor of the 4 ranks; got 3"),
        ({"sequence_parallel": 3}, "--sequence-parallel must divide the 4 ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        check_layout(MachineOptions(**layout), world=4)


def test_an_unknown_strategy_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown strategy 'fdsp'; did you mean .*'fsdp'"):
        small(strategy="fdsp")
