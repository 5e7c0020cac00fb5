"""A training step of the sequential MNIST classifier on each backend: images per second, and the scan's share of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from efla.bench.kernels import BACKENDS, contenders
from efla.experiments.smnist.config import MAIN_ARMS
from efla.experiments.smnist.speed import LENGTH, TRAIN_IMAGES, Stepper
from efla.runs.timing import Measurement, compare


def training(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward, clip and AdamW of the bare block on 128 images of 784 pixels, every main arm."""
    for arm in MAIN_ARMS:
        steppers = {name: Stepper(backend, arm) for name, backend in BACKENDS.items()}
        batch = steppers["native"].batch
        steps = TRAIN_IMAGES // batch
        measured = compare(
            f"sMNIST training step, {arm}, {batch} images of {LENGTH} (an epoch is {steps} steps)",
            contenders({name: torch.enable_grad()(stepper) for name, stepper in steppers.items()}),
            threads=threads, rounds=rounds, items=batch,
        )  # fmt: skip
        yield [replace(m, scan_share=steppers[m.contender].scan_share()) for m in measured]


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {"training": training}
