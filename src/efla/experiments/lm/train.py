"""Training of one cell, from a checkpoint if there is one: the result is that of a run nobody disturbed."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from efla import EflaForCausalLM
from efla.data.corpora import Corpus
from efla.data.sampling import RowSampler
from efla.data.streams import consecutive_rows
from efla.experiments.experiment import Report
from efla.experiments.lm.config import RAW_KEYS, LmConfig
from efla.experiments.lm.cost import Cost
from efla.experiments.lm.keys import key_energies
from efla.models import presets
from efla.runs.records import Record
from efla.train.checkpoint import Checkpoints
from efla.train.engine import Engine
from efla.train.optimizer import build_optimizer
from efla.train.schedule import WarmupCosine
from efla.train.step import train_step
from efla.train.validation import validate

TRAINING_SHARE = 0.75
"""Part of a cell's progress that is training; the rest is measuring."""
_CURVE_POINTS = 40
_STEPS_BETWEEN_REPORTS = 5


@dataclass
class Trained:
    """How far training is and what it saw; losses in bits per byte. Kept in checkpoints as it is."""

    step: int = 0
    losses: list[list[float]] = field(default_factory=list)
    """(step, mean training loss since the point before)."""
    validations: list[list[float]] = field(default_factory=list)
    """(step, bits per byte of the first validation_bytes)."""
    step_sizes: list[list[float]] = field(default_factory=list)
    """(step, largest beta * lam on the first validation rows), arms with raw keys."""
    nonfinite_steps: int = 0
    first_nonfinite: int | None = None
    ended_early: bool = False
    window: list[float] = field(default_factory=list)
    seconds: float = 0.0


def build(config: LmConfig, arm: str, seed: int) -> Any:
    """The model of an arm; arms of equal shape start from equal weights."""
    torch.manual_seed(seed)
    model = EflaForCausalLM(presets.arm(arm, config.profile, backend=config.backend))
    return cast(Any, model).to(config.device)


def optimizer_of(config: LmConfig, model: Any) -> torch.optim.AdamW:
    return build_optimizer(model, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps)


def train(
    model: Any,
    corpus: Corpus,
    config: LmConfig,
    *,
    arm: str,
    rate: float,
    seed: int,
    report: Report,
    scratch: Path | None,
    cost: Cost | None = None,
) -> Trained:
    """AdamW on rows that depend on the seed and the step alone, from the newest checkpoint in ``scratch``.

    ``cost`` is kept with every checkpoint and notes the memory of training. A step whose loss or gradient is not finite
    changes nothing and is counted; many of them end the run.
    """
    engine = Engine.alone(config.device)
    optimizer = optimizer_of(config, model)
    sampler = RowSampler(corpus.stream("train"), length=config.length, rows=config.rows, seed=seed)
    schedule = WarmupCosine.tenth(config.steps, rate)
    checkpoints = None if scratch is None else Checkpoints(scratch, engine, keep=1)
    progress = Trained()
    if checkpoints is not None and (newest := checkpoints.latest()) is not None:
        progress = Trained(**checkpoints.load(newest, model, optimizer)["progress"])
    probe = next(consecutive_rows(corpus.stream("validation"), config.length, config.rows)).to(config.device)
    window = max(1, config.steps // _CURVE_POINTS)
    last_save = time.perf_counter()
    for step in range(progress.step, config.steps):
        if progress.ended_early:
            break
        clock = time.perf_counter()
        result = train_step(
            model, optimizer, [sampler.batch(step)], rate=schedule.rate(step), clip=config.clip, engine=engine
        )
        progress.seconds += time.perf_counter() - clock
        progress.step = step + 1
        progress.window.append(result.loss / math.log(2))
        if not result.applied:
            _count_nonfinite(progress, config)
        if progress.step % window == 0 or progress.step == config.steps:
            progress.losses.append([progress.step, _mean(progress.window)])
            progress.window.clear()
        if progress.step % config.validate_every == 0 or progress.step == config.steps:
            _validate(progress, model, corpus, config, arm, probe)
        if progress.step % _STEPS_BETWEEN_REPORTS == 0:
            report(TRAINING_SHARE * progress.step / config.steps, bits=result.loss / math.log(2))
        due = time.perf_counter() - last_save >= config.save_seconds
        if checkpoints is not None and (due or progress.step == config.steps or progress.ended_early):
            checkpoints.save(progress.step, model, optimizer, {"progress": dataclasses.asdict(progress)})
            if cost is not None:
                cost.note_memory()
                cost.keep()
            last_save = time.perf_counter()
    if cost is not None:
        cost.note_memory()
    return progress


def summary(progress: Trained, config: LmConfig) -> Record:
    """What training leaves in the row."""
    return {
        "steps": progress.step,
        "bytes_seen": progress.step * config.bytes_per_step,
        "losses": [[step, float(f"{loss:.6g}")] for step, loss in progress.losses],
        "validations": [[step, float(f"{bits:.6g}")] for step, bits in progress.validations],
        "largest_step_sizes": progress.step_sizes,
        "nonfinite_steps": progress.nonfinite_steps,
        "first_nonfinite": progress.first_nonfinite,
        "failed": progress.nonfinite_steps > 0,
    }


def _count_nonfinite(progress: Trained, config: LmConfig) -> None:
    progress.nonfinite_steps += 1
    if progress.first_nonfinite is None:
        progress.first_nonfinite = progress.step
    progress.ended_early = progress.nonfinite_steps >= config.max_nonfinite


def _validate(progress: Trained, model: Any, corpus: Corpus, config: LmConfig, arm: str, probe: torch.Tensor) -> None:
    found = validate(
        model,
        corpus.stream("validation"),
        length=config.length,
        rows=config.rows,
        limit=config.validation_bytes,
        engine=Engine.alone(config.device),
    )
    progress.validations.append([progress.step, found.bits_per_token])
    if arm in RAW_KEYS:
        largest = max(record["step_size"][-1] for record in key_energies(model, probe))
        progress.step_sizes.append([progress.step, largest])


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
