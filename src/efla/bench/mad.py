"""A training step of the MAD benchmark's model with each backend, and the scan's share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import efla
from efla.bench.timing import Contender, Measurement, compare
from efla.experiments.mad.config import profile
from efla.experiments.mad.speed import stepper

BATCH = 32
BACKENDS = ("native", "chunked")
TASKS = ("in-context-recall", "selective-copying", "compression", "memorization")


def step(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward and AdamW of the full profile's model (d = 128, 4 heads) on baseline settings, batch 32."""
    config = profile("full")
    for task in TASKS:
        setting = config.setting(task, "baseline")
        contenders = [
            Contender(backend, stepper(replace(config, backend=backend), setting, "exact-flow", BATCH))
            for backend in BACKENDS
        ]
        work = f"MAD training step, {task}, d{config.width} L{setting.seq_len} B{BATCH}, exact-flow"
        yield compare(work, contenders, threads=threads, rounds=rounds)


def scan(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """The scan of one such layer alone, forward and backward."""
    contenders = [Contender(backend, _scan_call(backend)) for backend in BACKENDS]
    yield compare(
        f"its scan alone, forward and backward, B{BATCH} T127 H4 K32", contenders, threads=threads, rounds=rounds
    )


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {"step": step, "scan": scan}


def _scan_call(backend: str) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, 127, 4, 32, generator=generator).requires_grad_() for _ in range(3))
    beta = torch.rand(BATCH, 127, 4, generator=generator).requires_grad_()

    @torch.enable_grad()
    def call() -> object:
        o, _ = efla.linear_attention(q, k, v, beta, rule="efla", backend=backend)
        return torch.autograd.grad(o.sum(), (q, k, v, beta))

    return call
