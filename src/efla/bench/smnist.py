"""A training step of the sequential MNIST classifier on each backend: images per second, and the scan's share of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from efla import rowwise
from efla.bench.timing import Contender, Measurement, compare
from efla.experiments.smnist_robustness.config import MAIN_ARMS
from efla.experiments.smnist_robustness.speed import LENGTH, TRAIN_IMAGES, Stepper

PLAIN = "chunked, no compiled kernels"


def training(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward, clip and AdamW of the bare block on 128 images of 784 pixels, every main arm.

    ``chunked`` has the compiled norms and convolutions too; the third contender has nothing compiled.
    """
    for arm in MAIN_ARMS:
        steppers = {
            "native": Stepper("native", arm),
            "chunked": Stepper("chunked", arm),
            PLAIN: Stepper("chunked", arm),
        }
        calls: dict[str, Callable[[], object]] = {**steppers, PLAIN: rowwise.without_kernels()(steppers[PLAIN])}
        batch = steppers["native"].batch
        steps = TRAIN_IMAGES // batch
        measured = compare(
            f"sMNIST training step, {arm}, {batch} images of {LENGTH} (an epoch is {steps} steps)",
            [Contender(name, torch.enable_grad()(call)) for name, call in calls.items()],
            threads=threads, rounds=rounds, items=batch,
        )  # fmt: skip
        yield [replace(m, scan_share=steppers[m.contender].scan_share()) for m in measured]


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {"training": training}
