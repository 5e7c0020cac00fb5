"""A training step of the MAD benchmark's model with each backend, and the scan's share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

import efla
from efla.bench.kernels import BACKENDS, contenders
from efla.experiments.mad.config import profile
from efla.experiments.mad.speed import stepper
from efla.runs.timing import Contender, Measurement, compare

BATCH = 32
SGEMM_SIZE = 1024
TASKS = ("in-context-recall", "selective-copying", "compression", "memorization")


def step(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward and AdamW of the full profile's model (d = 128, 4 heads) on baseline settings, batch 32.

    Useful work counts the matrix products outside the scan, the same with either backend; sgemm's rate bounds them.
    """
    config = profile("full")
    square = torch.randn(SGEMM_SIZE, SGEMM_SIZE)
    for task in TASKS:
        setting = config.setting(task, "baseline")
        steps = {
            name: stepper(replace(config, backend=backend), setting, "exact-flow", BATCH)
            for name, backend in BACKENDS.items()
        }
        flops = _matrix_flops(steps["native"])
        work = f"MAD training step, {task}, d{config.width} L{setting.seq_len} B{BATCH}, exact-flow"
        measured = compare(
            work,
            [*contenders(steps), Contender("sgemm", lambda: square @ square)],
            threads=threads,
            rounds=rounds,
            useful_flops=flops,
            flops_of={"sgemm": 2.0 * SGEMM_SIZE**3},
        )
        _, chunked, _, sgemm = measured
        least = flops / (2.0 * SGEMM_SIZE**3) * sgemm.median
        print(
            f"{task}: matrix products outside the scan take {1e3 * least:.0f} ms at sgemm's rate; "
            f"with nothing else in it a step would be {chunked.median / least:.1f} times as fast as on chunked"
        )
        yield measured


def scan(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """The scan of one such layer alone, forward and backward."""
    backends = [Contender(backend, _scan_call(backend)) for backend in ("native", "chunked")]
    yield compare(
        f"its scan alone, forward and backward, B{BATCH} T127 H4 K32", backends, threads=threads, rounds=rounds
    )


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {"step": step, "scan": scan}


def _matrix_flops(step: Callable[[], object]) -> float:
    """Flops of the matrix products in one call; the native scan is an operator that torch does not count.

    Convolutions are left out: torch counts the gradient of a depthwise one as if every channel saw every other.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    return float(sum(flops for operator, flops in counts.items() if "conv" not in str(operator)))


def _scan_call(backend: str) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, 127, 4, 32, generator=generator).requires_grad_() for _ in range(3))
    beta = torch.rand(BATCH, 127, 4, generator=generator).requires_grad_()

    @torch.enable_grad()
    def call() -> object:
        o, _ = efla.linear_attention(q, k, v, beta, rule="efla", backend=backend)
        return torch.autograd.grad(o.sum(), (q, k, v, beta))

    return call
