"""A training step of the MAD model on each backend, its scan alone, and how long cells will take."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from efla.bench import BACKENDS, Suite, kernel_contenders, sgemm
from efla.bench.scan import Size, attention_call
from efla.experiments.arms import ARMS
from efla.experiments.experiment import Cell, Work
from efla.experiments.mad.config import MadConfig, profile
from efla.experiments.mad.model import build, loss_of
from efla.experiments.mad.tasks import Setting, generate
from efla.runs.timing import Measurement, compare, training_step
from efla.train.engine import Engine

BATCH = 32
SGEMM_SIZE = 1024
_TIMED_TOKENS = 4096
"""Tokens in a timed step; the time of a larger one is in proportion."""
_EVALUATION = 0.3
"""Forward pass as a share of a training step."""
TASKS = ("in-context-recall", "selective-copying", "compression", "memorization")


def step(rounds: int) -> Iterator[list[Measurement]]:
    """Forward, backward and AdamW of the full profile's model (d = 128, 4 heads) on baseline settings, batch 32.

    Useful work is the matrix products outside the scan, the same for each backend; sgemm's rate is their upper bound.
    """
    config = profile("full")
    product, flops_of = sgemm(SGEMM_SIZE)
    for task in TASKS:
        setting = config.setting(task, "baseline")
        steps = {
            name: stepper(replace(config, backend=backend), setting, "exact-flow", BATCH)
            for name, backend in BACKENDS.items()
        }
        flops = _matrix_flops(steps["native"])
        work = f"MAD training step, {task}, d{config.width} L{setting.seq_len} B{BATCH}, exact-flow"
        calls = {**kernel_contenders(steps), **product}
        measured = compare(work, calls, rounds=rounds, useful_flops=flops, flops_of=flops_of)
        chunked, multiplied = measured[1], measured[-1]
        least = flops / flops_of["sgemm"] * multiplied.median
        print(
            f"{task}: matrix products outside the scan take {1e3 * least:.0f} ms at sgemm's rate; "
            f"with nothing else in it a step would be {chunked.median / least:.1f} times as fast as on chunked"
        )
        yield measured


def scan(rounds: int) -> Iterator[list[Measurement]]:
    """The scan of one such layer alone, forward and backward."""
    calls = {backend: scan_call(backend) for backend in ("native", "chunked")}
    work = f"its scan alone, forward and backward, B{BATCH} T127 H4 K32"
    yield compare(work, calls, rounds=rounds)


SUITES: dict[str, Suite] = {"step": step, "scan": scan}


def scan_call(backend: str) -> Callable[[], object]:
    return attention_call(Size(BATCH, 127, 4, 32), "efla", backend, work="training")


def _matrix_flops(step: Callable[[], object]) -> float:
    """Flops of the matrix products in one call. The native scan is an operator that torch does not count.

    Convolutions are excluded: torch counts the gradient of a depthwise one as if it were dense.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    return float(sum(flops for operator, flops in counts.items() if "conv" not in str(operator)))


def stepper(config: MadConfig, setting: Setting, arm: str, batch: int) -> Callable[[], float]:
    """One training step (forward, backward, AdamW) as a callable that returns the loss."""
    data = generate(replace(setting, num_train_examples=batch, num_test_examples=1))
    inputs, targets = data.train_inputs.to(config.device), data.train_targets.to(config.device)
    model, engine = build(config, setting, arm, 0).to(config.device), Engine.alone(config.device)

    def loss() -> torch.Tensor:
        with engine.autocast(config.precision):
            return loss_of(model, inputs, targets)

    return training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), loss)


def work_of(config: MadConfig, cell: Cell) -> Work:
    """The steps of a cell at most; early stopping makes it shorter. One linear arm is timed for all of them: they differ
    little on a CPU."""
    setting, arm = config.setting(cell.settings["task"], cell.settings["setting"]), cell.settings["arm"]
    steps, batch = config.steps_of(setting), config.batch_of(setting.task)
    every = config.evaluate_every or -(-setting.num_train_examples // batch)
    evaluations = -(-steps // every) * _EVALUATION * setting.num_test_examples / batch
    timed = min(batch, max(1, _TIMED_TOKENS // setting.seq_len))
    return Work(
        steps=(steps + evaluations) * batch / timed,
        step=f"{setting.task} {setting.seq_len} {setting.vocab_size} {ARMS[arm].mixer}",
        build=lambda: stepper(config, setting, arm, timed),
    )
