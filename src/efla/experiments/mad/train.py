"""One protocol run: train on a setting with one learning rate and weight decay, evaluate on its own test set."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from efla.experiments.experiment import Report
from efla.experiments.mad.config import MadConfig
from efla.experiments.mad.metric import NOTHING, Score, evaluate
from efla.experiments.mad.model import loss_of
from efla.experiments.mad.tasks import MadData
from efla.runs.records import Record

LOWEST_RATE = 1e-6
"""Where the cosine schedule ends."""
_CURVE_POINTS = 100
_STEPS_BETWEEN_REPORTS = 10


@dataclass
class Trained:
    """What a run leaves: evaluations (step, score), the training loss in windows, and how it ended."""

    steps: int = 0
    epochs: float = 0.0
    scores: list[tuple[int, Score]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    diverged_at: int | None = None
    stopped_early: bool = False
    train_seconds: float = 0.0
    eval_seconds: float = 0.0

    @property
    def best(self) -> tuple[int, Score] | None:
        """The evaluation with the lowest test perplexity; ``None`` if none was finite."""
        finite = [item for item in self.scores if math.isfinite(item[1].perplexity)]
        return min(finite, key=lambda item: item[1].perplexity, default=None)


def batches(seed: int, count: int, batch: int) -> Iterator[tuple[int, Tensor]]:
    """Endless (epoch, indices): each epoch a fresh order from (seed, epoch), the same for every arm; the last batch of an
    epoch may be smaller."""
    epoch = 0
    while True:
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(count))
        for indices in order.split(batch):
            yield epoch, indices
        epoch += 1


def rate_at(rate: float, progress: float, schedule: str) -> float:
    """The learning rate after a share of the budget: constant, or cosine from ``rate`` to 1e-6."""
    if schedule == "constant":
        return rate
    return LOWEST_RATE + (rate - LOWEST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def train(
    model: nn.Module, data: MadData, config: MadConfig, *, rate: float, decay: float, seed: int, report: Report
) -> Trained:
    """AdamW until the budget is spent, the test accuracy exceeds ``stop_above``, or the loss is not finite.

    No clipping, no warm-up. A non-finite loss is an outcome, not an error: it ends the run and is recorded.
    """
    setting, device = data.setting, torch.device(config.device)
    inputs, targets = data.train_inputs.to(device), data.train_targets.to(device)
    test = (data.test_inputs.to(device), data.test_targets.to(device))
    model = model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, fused=True
    )
    batch, budget = config.batch_of(setting.task), config.steps_of(setting)
    per_epoch = -(-len(inputs) // batch)
    every = config.evaluate_every or per_epoch
    window, recent = max(1, budget // _CURVE_POINTS), torch.zeros((), device=device)
    result, value, shown = Trained(), math.nan, {"accuracy": math.nan}
    clock = time.perf_counter()
    for step, (epoch, indices) in enumerate(batches(seed, len(inputs), batch), start=1):
        if config.schedule != "constant":
            progress = epoch / config.epochs if config.epochs is not None else (step - 1) / budget
            optimizer.param_groups[0]["lr"] = rate_at(rate, progress, config.schedule)
        indices = indices.to(device)
        with autocast(config):
            loss = loss_of(model, inputs[indices], targets[indices])
        loss.backward()
        recent += loss.detach()
        if device.type == "cpu" or step % _STEPS_BETWEEN_REPORTS == 0:  # reading a loss makes a GPU wait
            value = float(loss.detach())
            if not math.isfinite(value):
                result.diverged_at = step
                break
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result.steps, result.epochs = step, step / per_epoch
        if step % window == 0:
            result.losses.append((step, float(recent) / window))
            recent.zero_()
        if step % every == 0 or step == budget:
            result.train_seconds += time.perf_counter() - clock
            clock = time.perf_counter()
            model.eval()
            with autocast(config):
                score = evaluate(model, *test)
            model.train()
            result.scores.append((step, score))
            shown = {"accuracy": score.reference_accuracy}
            result.eval_seconds += time.perf_counter() - clock
            clock = time.perf_counter()
            if score.reference_accuracy > config.stop_above:
                result.stopped_early = step < budget
                break
        if step % _STEPS_BETWEEN_REPORTS == 0:
            report(step / budget, loss=value, **shown)
        if step == budget:
            break
    result.train_seconds += time.perf_counter() - clock
    return result


def autocast(config: MadConfig) -> contextlib.AbstractContextManager[object]:
    """bfloat16 inside the model if the config says so; weights stay float32."""
    if config.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(config.device.partition(":")[0], dtype=torch.bfloat16)


def summary(result: Trained) -> Record:
    """A run's own numbers. "best" is the evaluation with the lowest test perplexity, "last" the last one; a run whose loss
    became non-finite has no last one."""
    best = result.best
    last = result.scores[-1] if result.scores and result.diverged_at is None else None
    best_score, last_score = best[1] if best else NOTHING, last[1] if last else NOTHING
    return {
        "steps": result.steps,
        "epochs": round(result.epochs, 3),
        "best_step": best[0] if best else None,
        "reference_accuracy": best_score.reference_accuracy,
        "reference_accuracy_last": last_score.reference_accuracy,
        "token_accuracy": best_score.token_accuracy,
        "token_accuracy_last": last_score.token_accuracy,
        "test_loss": best_score.loss,
        "test_loss_last": last_score.loss,
        "test_perplexity": best_score.perplexity,
        "stopped_early": result.stopped_early,
        "diverged_at": result.diverged_at,
        "evaluations": [{"step": step, **score.record()} for step, score in result.scores],
        "losses": [[step, float(f"{loss:.6g}")] for step, loss in result.losses],
        "timing": {
            "train_seconds": round(result.train_seconds, 2),
            "eval_seconds": round(result.eval_seconds, 2),
            "seconds_per_step": round(result.train_seconds / max(1, result.steps), 5),
        },
    }
