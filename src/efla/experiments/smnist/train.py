"""Training one arm at one rate with one seed, and scoring it on clean and corrupted test images."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from efla.experiments.experiment import Report
from efla.experiments.smnist.config import SmnistConfig
from efla.experiments.smnist.data import Mnist, sequences
from efla.experiments.smnist.model import AuthorsClassifier, Model, parameter_groups
from efla.runs.records import Record

_EVAL_BATCH = 250
CHANCE_LOSS = math.log(10)
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass
class Data:
    """Sequences and labels of one profile: training images in their fixed order, and all test images."""

    train_x: Tensor
    train_y: Tensor
    test_x: NDArray[np.float32]
    test_y: Tensor
    subset: Tensor
    """Indices of test2k."""
    file_order: Tensor = field(default_factory=lambda: torch.arange(0))
    """Where the training images are, in the order of their file."""

    @classmethod
    def of(cls, mnist: Mnist, config: SmnistConfig) -> Data:
        count = len(mnist.train) if config.train_images is None else config.train_images
        if not config.batch <= count <= len(mnist.train):
            raise ValueError(
                f"train_images must lie between the batch, {config.batch}, and the {len(mnist.train)} there are, got {count}"
            )
        order = np.random.default_rng(0).permutation(len(mnist.train))[:count]
        subset = np.arange(0, len(mnist.test), 5) if len(mnist.test) >= 10_000 else np.arange(len(mnist.test))
        return cls(
            train_x=torch.from_numpy(sequences(mnist.train.pixels[order], config.length)),
            train_y=torch.from_numpy(mnist.train.labels[order].astype(np.int64)),
            test_x=sequences(mnist.test.pixels, config.length),
            test_y=torch.from_numpy(mnist.test.labels.astype(np.int64)),
            subset=torch.from_numpy(subset),
            file_order=torch.from_numpy(np.argsort(order)),
        )

    def indices(self, which: str) -> Tensor:
        return self.subset if which == "test2k" else torch.arange(len(self.test_y))


@dataclass
class Trained:
    """What a training run leaves: the loss of every step, accuracies on the way, and how it went."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    diverged_at: int | None = None
    clipped: int = 0
    largest_step_size: float = 0.0
    seconds: float = 0.0
    scan_seconds: float = 0.0
    right: list[tuple[int, int]] = field(default_factory=list)
    """Per step, the images that were recognised before the update, and all images."""
    step_distributions: list[Record] = field(default_factory=list)
    """What :func:`step_distribution` says of eleven batches on the way (authors' blocks)."""


@dataclass(frozen=True)
class Score:
    """Accuracy (a row with a non-finite logit counts as wrong), share of such rows, and beta * lam over tokens."""

    accuracy: float
    nonfinite: float
    median_step_size: float
    largest_step_size: float
    right: Tensor
    """For each image whether it was recognised."""


def batch_indices(seed: int, epoch: int, count: int, batch: int) -> Tensor:
    """Order of one pass, from (seed, epoch) and so the same for every arm: [count // batch, batch]."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return torch.from_numpy(order[: count // batch * batch].reshape(-1, batch))


def batches(model: Model, data: Data, config: SmnistConfig, seed: int) -> Iterator[Tensor]:
    """Indices of the training images of every step, pass after pass, the same for every arm.

    The authors' blocks take all images in the order in which the script's DataLoader gives them, so the last batch of a
    pass is smaller; ours take the order of :func:`batch_indices`.
    """
    count = len(data.train_y)
    if isinstance(model, AuthorsClassifier):
        generator = torch.Generator().manual_seed(model.order_seed)
        while True:
            yield from data.file_order[torch.randperm(count, generator=generator)].split(config.batch)
    for epoch in itertools.count():
        yield from batch_indices(seed, epoch, count, config.batch)


def train(model: Model, data: Data, config: SmnistConfig, rate: float, seed: int, report: Report) -> Trained:
    """AdamW at a constant rate with gradients clipped to a global norm; a non-finite loss ends the run and is recorded."""
    decayed, undecayed = parameter_groups(model)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=(0.9, 0.999), eps=1e-8)
    result = Trained()
    for step, picked in zip(range(config.steps), batches(model, data, config, seed), strict=False):
        if isinstance(model, AuthorsClassifier) and step % max(1, config.steps // 10) == 0:
            result.step_distributions.append({"step": step} | step_distribution(model, data.train_x[picked]))
        clock, model.probe.scan_seconds = time.perf_counter(), 0.0
        logits, labels = model(data.train_x[picked]), data.train_y[picked]
        loss = functional.cross_entropy(logits, labels)
        value = float(loss.detach())
        result.largest_step_size = max(result.largest_step_size, float(model.probe.take().max()))
        if not math.isfinite(value):
            result.diverged_at = step
            break
        result.losses.append(value)
        result.right.append((int((logits.argmax(1) == labels).sum()), len(labels)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        result.clipped += not float(norm) <= config.clip
        optimizer.step()
        result.seconds += time.perf_counter() - clock
        result.scan_seconds += model.probe.scan_seconds
        if config.accuracy_every and (step + 1) % config.accuracy_every == 0 and step + 1 < config.steps:
            score = evaluate(model, torch.from_numpy(data.test_x)[data.subset], data.test_y[data.subset])
            result.accuracies.append((step + 1, score.accuracy))
        shown = {"accuracy": result.accuracies[-1][1]} if result.accuracies else {}
        report(0.9 * (step + 1) / config.steps, loss=value, **shown)
    return result


@torch.no_grad()
def evaluate(model: Model, x: Tensor, y: Tensor) -> Score:
    """Score a model on sequences [n, L] with labels [n]."""
    model.probe.keep_all = True
    right, bad = torch.zeros(len(y), dtype=torch.bool), 0
    for start in range(0, len(y), _EVAL_BATCH):
        part = slice(start, start + _EVAL_BATCH)
        logits = model(x[part])
        finite = logits.isfinite().all(1)
        right[part] = finite & (logits.argmax(1) == y[part])
        bad += int((~finite).sum())
    model.probe.keep_all = False
    sizes = model.probe.take()
    return Score(int(right.sum()) / len(y), bad / len(y), float(sizes.median()), float(sizes.max()), right)


@torch.no_grad()
def step_distribution(model: AuthorsClassifier, x: Tensor) -> Record:
    """Where the steps of a model lie on sequences [n, L]: quantiles over tokens of beta, of |k| before any normalisation
    and of beta * lam, and the share of tokens whose Euler step, beta * lam, is over 5 % longer than the exact one,
    1 - exp(-beta * lam)."""
    _, k, _, beta = model.project(x)
    norm = k.norm(dim=-1, keepdim=True)
    step_size = beta if model.arm.l2_keys else beta * norm.square()
    exact = -torch.expm1(-step_size)
    levels = torch.tensor(QUANTILES)
    return {
        **{
            name: [float(f"{value:.4g}") for value in torch.quantile(values.flatten(), levels).tolist()]
            for name, values in (("beta", beta), ("key_norm", norm), ("step_size", step_size))
        },
        "euler_off_by_5_percent": float((step_size - exact > 0.05 * exact).float().mean()),
    }


def summary(result: Trained, config: SmnistConfig) -> Record:
    """A run's own numbers; the final loss is the mean over the last tenth of the steps, and so is the accuracy before the
    update: in the first pass that is an accuracy on images not seen yet."""
    last_tenth = slice(-max(1, config.steps // 10), None)
    tail, right = result.losses[last_tenth], result.right[last_tenth]
    diverged = result.diverged_at is not None
    final = math.nan if diverged or not tail else float(np.mean(tail))
    return {
        "final_loss": final,
        "diverged": diverged or not final <= CHANCE_LOSS,
        "diverged_at": result.diverged_at,
        "losses": [float(f"{loss:.6g}") for loss in result.losses],
        "accuracy_before_update": sum(count for count, _ in right) / max(1, sum(total for _, total in right)),
        "step_distributions": result.step_distributions,
        "clip_share": result.clipped / max(1, len(result.losses)),
        "largest_step_size": result.largest_step_size,
        "timing": {
            "train_seconds": round(result.seconds, 2),
            "images_per_second": round(len(result.losses) * config.batch / max(result.seconds, 1e-9), 1),
            "scan_share": round(result.scan_seconds / max(result.seconds, 1e-9), 3),
        },
    }
