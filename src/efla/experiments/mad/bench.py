"""A training step of the MAD model on each backend, its scan alone, and how long cells will take."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from efla.bench import BACKENDS, Suite, kernel_contenders, sgemm
from efla.bench.scan import Size, attention_call
from efla.experiments.experiment import Cell
from efla.experiments.mad import tasks as mad
from efla.experiments.mad.config import ARMS, MadConfig, profile
from efla.experiments.mad.model import build, loss_of
from efla.experiments.mad.run import autocast
from efla.experiments.mad.tasks import Setting
from efla.runs.timing import Contender, Measurement, compare, seconds_per_call, training_step

BATCH = 32
SGEMM_SIZE = 1024
_TIMED_TOKENS = 4096
"""Tokens in a timed step; the time of a larger one is in proportion."""
_EVALUATION = 0.3
"""Forward pass as a share of a training step."""
TASKS = ("in-context-recall", "selective-copying", "compression", "memorization")


def step(threads: int, rounds: int) -> Iterator[list[Measurement]]:
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
        measured = compare(
            work,
            [*kernel_contenders(steps), product],
            threads=threads,
            rounds=rounds,
            useful_flops=flops,
            flops_of=flops_of,
        )
        chunked, multiplied = measured[1], measured[-1]
        least = flops / flops_of["sgemm"] * multiplied.median
        print(
            f"{task}: matrix products outside the scan take {1e3 * least:.0f} ms at sgemm's rate; "
            f"with nothing else in it a step would be {chunked.median / least:.1f} times as fast as on chunked"
        )
        yield measured


def scan(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """The scan of one such layer alone, forward and backward."""
    backends = [Contender(backend, scan_call(backend)) for backend in ("native", "chunked")]
    yield compare(
        f"its scan alone, forward and backward, B{BATCH} T127 H4 K32", backends, threads=threads, rounds=rounds
    )


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
    few = replace(setting, num_train_examples=batch, num_test_examples=1)
    data = mad.generate(few)
    inputs, targets = data.train_inputs.to(config.device), data.train_targets.to(config.device)
    model = build(config, setting, arm, 0).to(config.device)

    def loss() -> torch.Tensor:
        with autocast(config):
            return loss_of(model, inputs, targets)

    return training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), loss)


def seconds_per_step(config: MadConfig, setting: Setting, arm: str, threads: int) -> float:
    """Time of one step at the config's batch size."""
    full = config.batch_of(setting.task)
    batch = min(full, max(1, _TIMED_TOKENS // setting.seq_len))
    return seconds_per_call(stepper(config, setting, arm, batch), threads) * full / batch


def expected_seconds(config: MadConfig, cells: Sequence[Cell], threads: int) -> list[float]:
    """Upper estimate for each cell, from a few steps timed now; early stopping makes a cell shorter.

    One linear arm is timed for all of them: they differ little on a CPU.
    """
    timed: dict[tuple[str, int, int, str], float] = {}
    found = []
    for cell in cells:
        setting = config.setting(cell.settings["task"], cell.settings["setting"])
        key = (setting.task, setting.seq_len, setting.vocab_size, ARMS[cell.settings["arm"]].mixer)
        if key not in timed:
            timed[key] = seconds_per_step(config, setting, cell.settings["arm"], threads)
        steps = config.steps_of(setting)
        batch = config.batch_of(setting.task)
        every = config.evaluate_every or -(-setting.num_train_examples // batch)
        evaluations = -(-steps // every) * _EVALUATION * setting.num_test_examples / batch
        found.append((steps + evaluations) * timed[key])
    return found
