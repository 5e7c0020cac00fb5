"""How long steps take on this machine, and from that how long cells will."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from efla.experiments.experiment import Cell
from efla.experiments.mad import tasks as mad
from efla.experiments.mad.config import ARMS, MadConfig
from efla.experiments.mad.model import build, loss_of
from efla.experiments.mad.tasks import Setting
from efla.experiments.mad.train import autocast

_TOKENS = 4096
"""Tokens in a timed step; the time of a larger one is in proportion."""
_EVALUATION = 0.3
"""Forward pass as a share of a training step."""


def stepper(config: MadConfig, setting: Setting, arm: str, batch: int) -> Callable[[], float]:
    """One training step (forward, backward, AdamW) as a call that returns the loss."""
    few = replace(setting, num_train_examples=batch, num_test_examples=1)
    data = mad.generate(few)
    inputs, targets = data.train_inputs.to(config.device), data.train_targets.to(config.device)
    model = build(config, setting, arm, 0).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    @torch.enable_grad()
    def step() -> float:
        with autocast(config):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def seconds_per_step(config: MadConfig, setting: Setting, arm: str) -> float:
    """Time of one step at the config's batch, from the faster of two after one that is not counted."""
    full = config.batch_of(setting.task)
    batch = min(full, max(1, _TOKENS // setting.seq_len))
    step = stepper(config, setting, arm, batch)
    times = []
    for _ in range(3):
        clock = time.perf_counter()
        step()
        times.append(time.perf_counter() - clock)
    return min(times[1:]) * full / batch


def expected_seconds(config: MadConfig, cells: Sequence[Cell], threads: int) -> list[float]:
    """About the longest each cell takes, from a few steps timed now: an early stop makes a cell shorter.

    One linear arm stands for all of them: they differ little on a CPU.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    timed: dict[tuple[str, int, int, str], float] = {}
    found = []
    for cell in cells:
        setting = config.setting(cell.settings["task"], cell.settings["setting"])
        key = (setting.task, setting.seq_len, setting.vocab_size, ARMS[cell.settings["arm"]].mixer)
        if key not in timed:
            timed[key] = seconds_per_step(config, setting, cell.settings["arm"])
        steps = config.steps_of(setting)
        batch = config.batch_of(setting.task)
        every = config.evaluate_every or -(-setting.num_train_examples // batch)
        evaluations = -(-steps // every) * _EVALUATION * setting.num_test_examples / batch
        found.append((steps + evaluations) * timed[key])
    torch.set_num_threads(threads_before)
    return found
