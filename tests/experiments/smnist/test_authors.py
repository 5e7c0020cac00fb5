"""The authors' block is the loop of their script, and its profile their protocol."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from efla.experiments.experiment import Group
from efla.experiments.smnist.config import (
    AUTHORS_ARMS,
    AUTHORS_CHANGES,
    AUTHORS_LEVELS,
    FULL_LEVELS,
    LEVELS,
    profile,
)
from efla.experiments.smnist.data import Images, Mnist
from efla.experiments.smnist.model import AuthorsClassifier, build
from efla.experiments.smnist.run import Data, SmnistRobustness, batches, step_distribution, train

AUTHORS = profile("authors", dataset="idx")
SMALL = dataclasses.replace(AUTHORS, length=196)
LITERAL_STEPS = {
    "exact-flow": lambda beta, lam: -torch.expm1(-beta * lam) / lam,
    "clamped": lambda beta, lam: -torch.expm1(-beta * lam.clamp(min=1e-6)) / (lam.clamp(min=1e-6) + 1e-6),
    "delta-l2": lambda beta, lam: beta,
    "delta-raw": lambda beta, lam: beta,
    "implicit-euler": lambda beta, lam: beta / (1 + beta * lam),
    "crank-nicolson": lambda beta, lam: beta / (1 + beta * lam / 2),
}


class TokenByToken(nn.Module):
    """The script's classifier with the names of ours: the memory is updated pixel by pixel, then read once."""

    def __init__(self, arm: str, length: int = 196, width: int = 64) -> None:
        super().__init__()
        self.arm = arm
        self.embed = nn.Linear(1, width, bias=False)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.beta = nn.Linear(width, 1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        nn.init.xavier_uniform_(self.q.weight)
        nn.init.xavier_uniform_(self.k.weight)
        nn.init.xavier_uniform_(self.v.weight)
        nn.init.constant_(self.beta.bias, -2.0)

    def forward(self, pixels: Tensor) -> Tensor:
        memory = torch.zeros(len(pixels), 64, 64)
        for t in range(pixels.shape[1]):
            x = functional.gelu(self.embed(pixels[:, t : t + 1]) + self.positions[t])
            k, v, beta = self.k(x), self.v(x), torch.sigmoid(self.beta(x))
            if self.arm == "delta-l2":
                k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            step = LITERAL_STEPS[self.arm](beta, (k * k).sum(-1, keepdim=True))
            found = torch.einsum("bk,bkv->bv", k, memory)
            memory = memory + torch.einsum("bk,bv->bkv", step * k, v - found)
        logits: Tensor = self.head(self.norm(torch.einsum("bkv,bk->bv", memory, self.q(x))))
        return logits


def digits(count: int, length: int = 196) -> Tensor:
    random = np.random.default_rng(0)
    ink = random.random((count, length)) < 0.2
    return torch.from_numpy((ink * random.random((count, length))).astype(np.float32))


def quiet(fraction: float, **values: float) -> None:
    """No progress display."""


def literal(arm: str, seed: int) -> TokenByToken:
    torch.manual_seed(seed)
    return TokenByToken(arm)


@pytest.mark.parametrize("arm", LITERAL_STEPS)
def test_logits_and_gradients_are_those_of_the_token_by_token_loop(arm: str) -> None:
    block, name = ("authors-clamped", "exact-flow") if arm == "clamped" else ("authors", arm)
    ours, theirs, x = build(SMALL, block, name, 44), literal(arm, 44), digits(4)
    assert isinstance(ours, AuthorsClassifier)
    for model in (ours, theirs):
        nn.init.constant_(model.beta.bias, 1.0)  # longer steps, to tell the rules apart
        functional.cross_entropy(model(x), torch.arange(4)).backward()
    assert float(ours.probe.pop().max()) > (0.5 if arm == "delta-l2" else 2.0)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    torch.testing.assert_close(grads, {n: p.grad for n, p in theirs.named_parameters()}, rtol=0, atol=1e-5)


def test_equal_seeds_give_the_scripts_initial_weights_and_order_of_the_data() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (300, 28, 28), dtype=np.uint8)
    labels = (np.arange(300) % 10).astype(np.uint8)
    data = Data.of(Mnist("idx", Images(pixels, labels), Images(pixels, labels), ""), SMALL)
    theirs = literal("delta-l2", 43)
    order = list(DataLoader(range(300), batch_size=128, shuffle=True))  # type: ignore[arg-type]
    for arm in LITERAL_STEPS.keys() - {"clamped"}:
        ours = build(SMALL, "authors", arm, 43)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
        found = [data.train_x[picked] for picked, _ in zip(batches(ours, data, SMALL, 43), range(4), strict=False)]
        assert [len(batch) for batch in found] == [128, 128, 44, 128], "the last batch of a pass is smaller"
        for ours_batch, theirs_batch in zip(found, order, strict=False):
            np.testing.assert_array_equal(ours_batch.numpy(), data.test_x[theirs_batch.numpy()])
        assert not torch.equal(found[3], found[0])


def test_each_change_keeps_the_shared_tensors_and_changes_the_logits() -> None:
    x = digits(4)
    plain = build(SMALL, "authors", "exact-flow", 0)
    for block in AUTHORS_CHANGES:
        changed = build(SMALL, block, "exact-flow", 0)
        tensors = changed.state_dict()
        assert all(torch.equal(tensors[name], value) for name, value in plain.state_dict().items())
        with torch.no_grad():
            difference = float((changed(x) - plain(x)).abs().max())
        # A norm follows the read, so the query's length is seen by the norm's epsilon alone.
        assert (difference < 1e-3) == (block == "authors-clamped"), (block, difference)
        assert difference > 0, block


# The protocol


def test_the_grid_is_that_of_the_script_with_more_seeds_pairs_first() -> None:
    cells = [cell.settings for cell in SmnistRobustness(AUTHORS).cells()]
    assert len(cells) == 2 * 2 * 10 + 3 * 2 * 3
    assert [(c["arm"], c["rate"], c["seed"]) for c in cells[:4]] == [
        ("exact-flow", 3e-3, 42), ("delta-l2", 3e-3, 42), ("exact-flow", 3e-3, 43), ("delta-l2", 3e-3, 43),
    ]  # fmt: skip
    assert {c["rate"] for c in cells[:20]} == {1e-3, 3e-3}
    assert {c["arm"] for c in cells[:40]} == set(AUTHORS_ARMS)
    images = [AUTHORS.perturbed_images(c["block"], c["arm"], c["rate"]) for c in cells]
    assert images == ["all"] * 40 + ["test2k"] * 18
    assert (AUTHORS.steps, AUTHORS.batch, AUTHORS.clip, AUTHORS.weight_decay) == (math.ceil(60_000 / 128), 128, 1, 0.01)
    assert AUTHORS.levels() == AUTHORS_LEVELS
    changes = dataclasses.replace(AUTHORS, groups=profile("authors-changes", dataset="idx").groups)
    assert changes == profile("authors-changes", dataset="idx"), "both grids fit into one folder"
    assert len(SmnistRobustness(changes).cells()) == 4 * 2 * 3 + 1
    with pytest.raises(ValueError, match="'authors' has no gate: run gated-delta on another block"):
        dataclasses.replace(
            AUTHORS, groups=(Group(("exact-flow", "gated-delta"), (1e-3,), (0,), settings=("authors",)),)
        )


def test_new_levels_leave_the_random_fields_of_the_old_ones_alone() -> None:
    for kind, levels in FULL_LEVELS.items():
        assert LEVELS[kind][: len(levels)] == levels
        assert set(AUTHORS_LEVELS[kind]) <= set(LEVELS[kind])
        assert len(set(LEVELS[kind])) == len(LEVELS[kind])


# What rows say


def test_the_step_distribution_counts_steps_where_euler_is_off_by_five_percent() -> None:
    model = build(SMALL, "authors", "exact-flow", 0)
    assert isinstance(model, AuthorsClassifier)
    x = digits(8)
    with torch.no_grad():
        _, k, _, beta = model.project(x)
        step_size = beta[..., 0] * k.square().sum(-1)
    found = step_distribution(model, x)
    # x / (1 - exp(-x)) = 1.05 at x = 0.09836
    assert found["euler_off_by_5_percent"] == pytest.approx(float((step_size > 0.09836).float().mean()), abs=1e-3)
    assert 0.05 < found["euler_off_by_5_percent"] < 0.95
    assert found["step_size"][3] == pytest.approx(float(step_size.median()), rel=1e-2)
    assert found["beta"][3] == pytest.approx(float(beta.median()), rel=1e-2)
    assert found["key_norm"][3] == pytest.approx(float(k.norm(dim=-1).median()), rel=1e-2)
    normalised = build(SMALL, "authors", "delta-l2", 0)
    assert isinstance(normalised, AuthorsClassifier)
    found_l2 = step_distribution(normalised, x)
    assert found_l2["step_size"] == found_l2["beta"]
    assert found_l2["key_norm"] == found["key_norm"]


def test_rows_hold_what_a_paired_comparison_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = digits(60), torch.arange(60) % 3  # every third image is a zero
    every_third = torch.arange(0, 60, 3)
    data = Data(x, y, x.numpy(), y, every_third, torch.arange(60))
    described = Images(np.zeros((1, 28, 28), np.uint8), np.zeros(1, np.uint8))
    mnist = Mnist("idx", described, described, "")
    monkeypatch.setattr("efla.experiments.smnist.run._data", lambda config: (mnist, data))
    config = dataclasses.replace(
        SMALL, steps=12, batch=8, dropout_levels=(0, 1), scale_levels=(1, 10), noise_levels=(0, 0.5)
    )
    experiment = SmnistRobustness(config)
    for arm, images in (("exact-flow", 60), ("delta-raw", 20)):
        cell = next(cell for cell in experiment.cells() if cell.settings["arm"] == arm)
        *levels, run = experiment.run_cell(cell, quiet)
        assert [(row["kind"], row["level"]) for row in levels] == [
            (kind, level) for kind, both in config.levels().items() for level in both
        ]
        assert {row["images"] for row in levels} == {images}
        assert run["clean_images"] == 60
        model = build(config, "authors", arm, cell.settings["seed"])
        result = train(model, data, config, cell.settings["rate"], cell.settings["seed"], quiet)
        assert run["losses"] == pytest.approx(result.losses, rel=1e-5)
        with torch.no_grad():
            right = model(x).argmax(1) == y
            blank = model(torch.zeros(60, 196)).argmax(1) == y
        assert run["clean_accuracy"] == pytest.approx(float(right.float().mean()))
        for row in levels:
            if row["level"] == config.levels()[row["kind"]][0]:
                assert row["accuracy_test2k"] == pytest.approx(float(right[every_third].float().mean()))
                assert row["accuracy"] == (run["clean_accuracy"] if images == 60 else row["accuracy_test2k"])
        assert levels[1]["accuracy_test2k"] == pytest.approx(float(blank[every_third].float().mean()))
        assert [row["step"] for row in run["step_distributions"]] == list(range(12))
        assert run["accuracy_before_update"] == pytest.approx(result.right[-1][0] / 8), (
            "the last tenth is one step here"
        )
