"""Training one arm at one rate with one seed, and scoring it on clean and corrupted test images."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from efla.data.smnist import Mnist, sequences
from efla.experiments.framework.experiment import Record, Report
from efla.experiments.smnist_robustness.config import SmnistConfig
from efla.experiments.smnist_robustness.model import Classifier, parameter_groups

_EVAL_BATCH = 250
CHANCE_LOSS = math.log(10)


@dataclass
class Data:
    """Sequences and labels of one profile: training images in their fixed order, and all test images."""

    train_x: Tensor
    train_y: Tensor
    test_x: NDArray[np.float32]
    test_y: Tensor
    subset: Tensor
    """Indices of test2k."""

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


@dataclass(frozen=True)
class Score:
    """Accuracy (a row with a non-finite logit counts as wrong), share of such rows, and beta * lam over tokens."""

    accuracy: float
    nonfinite: float
    median_step_size: float
    largest_step_size: float


def batch_indices(seed: int, epoch: int, count: int, batch: int) -> Tensor:
    """Order of one pass, from (seed, epoch) and so the same for every arm: [count // batch, batch]."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return torch.from_numpy(order[: count // batch * batch].reshape(-1, batch))


def train(model: Classifier, data: Data, config: SmnistConfig, rate: float, seed: int, report: Report) -> Trained:
    """AdamW at a constant rate with gradients clipped to a global norm; a non-finite loss ends the run and is recorded."""
    decayed, undecayed = parameter_groups(model)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=(0.9, 0.999), eps=1e-8)
    result, per_epoch = Trained(), len(data.train_y) // config.batch
    order = torch.empty(0)
    for step in range(config.steps):
        if step % per_epoch == 0:
            order = batch_indices(seed, step // per_epoch, len(data.train_y), config.batch)
        picked = order[step % per_epoch]
        clock, model.probe.scan_seconds = time.perf_counter(), 0.0
        loss = functional.cross_entropy(model(data.train_x[picked]), data.train_y[picked])
        value = float(loss.detach())
        result.largest_step_size = max(result.largest_step_size, float(model.probe.take().max()))
        if not math.isfinite(value):
            result.diverged_at = step
            break
        result.losses.append(value)
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
def evaluate(model: Classifier, x: Tensor, y: Tensor) -> Score:
    """Score a model on sequences [n, L] with labels [n]."""
    model.probe.keep_all = True
    right = bad = 0
    for start in range(0, len(y), _EVAL_BATCH):
        part = slice(start, start + _EVAL_BATCH)
        logits = model(x[part])
        finite = logits.isfinite().all(1)
        right += int((finite & (logits.argmax(1) == y[part])).sum())
        bad += int((~finite).sum())
    model.probe.keep_all = False
    sizes = model.probe.take()
    return Score(right / len(y), bad / len(y), float(sizes.median()), float(sizes.max()))


def summary(result: Trained, config: SmnistConfig) -> Record:
    """A run's own numbers; the final loss is the mean over the last tenth of the steps."""
    tail = result.losses[-max(1, config.steps // 10) :]
    diverged = result.diverged_at is not None
    final = math.nan if diverged or not tail else float(np.mean(tail))
    return {
        "final_loss": final,
        "diverged": diverged or not final <= CHANCE_LOSS,
        "diverged_at": result.diverged_at,
        "losses": [float(f"{loss:.6g}") for loss in result.losses],
        "clip_share": result.clipped / max(1, len(result.losses)),
        "largest_step_size": result.largest_step_size,
        "timing": {
            "train_seconds": round(result.seconds, 2),
            "images_per_second": round(len(result.losses) * config.batch / max(result.seconds, 1e-9), 1),
            "scan_share": round(result.scan_seconds / max(result.seconds, 1e-9), 3),
        },
    }
