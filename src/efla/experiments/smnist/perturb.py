"""The three corruptions of test images, the same for every arm, seed and profile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from efla.errors import unknown_name
from efla.experiments.smnist.config import LEVELS

KINDS = {"dropout": 0, "scale": 1, "noise": 2}


def perturb(pixels: NDArray[np.float32], kind: str, level: float) -> NDArray[np.float32]:
    """Corrupt all test images, [n, L] in [0, 1], at one level; nothing is rescaled or clipped afterwards.

    dropout p: keep each pixel with probability 1 - p, else 0;   scale s: s * pixel;   noise sigma: pixel + sigma N(0, 1)

    The random field comes from a generator seeded with [1234, kind, level's place in the full list of levels], drawn for
    all images in index order: pass the whole test set and pick a subset afterwards.
    """
    if kind not in KINDS:
        raise unknown_name("kind of corruption", kind, KINDS)
    generator = np.random.default_rng([1234, KINDS[kind], LEVELS[kind].index(level)])
    if kind == "dropout":
        keep = generator.random(pixels.shape, dtype=np.float32) >= level
        return pixels * keep
    if kind == "scale":
        return pixels * np.float32(level)
    return pixels + np.float32(level) * generator.standard_normal(pixels.shape, dtype=np.float32)
