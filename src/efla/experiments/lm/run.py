"""The language-model runs. A cell trains one arm with one rate and seed, and measures it.

Interrupted cells resume from their checkpoint; the row is bit-identical to that of an uninterrupted cell.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from efla import EflaForCausalLM
from efla.data import corpora
from efla.data.sampling import RowSampler
from efla.evaluation.tasks import SOURCES, require_lm_eval, task_file
from efla.experiments.experiment import Cell, Experiment, Report, Work, grid_cells
from efla.experiments.lm.config import CHOICES, RAW_KEYS, LmConfig
from efla.experiments.lm.measure import POSITIONS, Subject, key_energies, measurements
from efla.models import presets
from efla.models.accounting import parameter_count
from efla.runs.provenance import PeakMemory, backend_used
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically
from efla.train.checkpoint import Checkpoints
from efla.train.engine import Engine
from efla.train.optimizer import WarmupCosine, build_optimizer
from efla.train.step import train_step

IN_PROGRESS = "in-progress"
TRAINING_SHARE = 0.75
"""Share of a cell's progress that is training; the rest is measuring."""
_CURVE_POINTS = 40
_STEPS_BETWEEN_REPORTS = 5
_FORWARD = 0.32
"""Time of a forward pass as a share of a training step."""
# Approximate bytes of the test sets: WikiText's 62 articles, a LAMBADA passage, a question with its choices.
_WIKITEXT, _PASSAGE, _QUESTION, _PASSAGES = 1_290_000, 330, 500, 5_153


class LanguageModels(Experiment[LmConfig]):
    """The paper's main table, scaled to two CPU cores."""

    name = "lm"
    title = "Language models over bytes"
    claim = "EFLA has a lower perplexity and a higher zero-shot accuracy than DeltaNet"
    places: ClassVar[dict[str, str]] = {
        "a": "Table 1, 340M and 1.3B",
        "b": "Table 1, gated variants",
        "c": "Table 1, Section 4.2",
        "d": "Table 1, averages",
    }
    config_class = LmConfig

    def cells(self) -> list[Cell]:
        """Group by group with arms innermost, so that the first cells already compare them."""
        axes = ("rates", "seeds", "arms")
        return grid_cells(self.config.groups, axes, lambda rate, seed, arm: {"arm": arm, "rate": rate, "seed": seed})

    def with_output(self, output: Path) -> LanguageModels:
        return LanguageModels(replace(self.config, scratch=str((output / IN_PROGRESS).resolve())))

    def prepare(self) -> None:
        corpora.load(self.config.corpus, self.config.folder)
        if self.config.downstream:
            assert self.config.folder is not None
            require_lm_eval()
            for task, source in SOURCES.items():
                for name in source.files:
                    task_file(Path(self.config.folder), name, task)

    def work(self, cell: Cell) -> Work:
        """Work done before an interruption is not subtracted."""
        config, arm = self.config, cell.settings["arm"]
        scored = _scored_bytes(config, cell.settings["seed"])
        return Work(config.steps + _FORWARD * scored / config.bytes_per_step, arm, lambda: _step(config, arm))

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        config, arm, seed = self.config, cell.settings["arm"], cell.settings["seed"]
        corpus = corpora.load(config.corpus, config.folder)
        scratch = self._scratch(cell)
        cost = Cost(config.device, scratch)
        subject = Subject(build(config, arm, seed), arm, seed, corpus, config)
        training = train(subject, cell.settings["rate"], report, scratch, cost)
        found = measure(subject, report, scratch, cost)
        seconds = max(training.seconds, 1e-9)
        return [
            {
                "profile": config.profile,
                "parameters": parameter_count(subject.model),
                "backend": "torch" if arm == "attention" else backend_used(config.backend, config.device),
                "data": {
                    "corpus": corpus.name, "source": corpus.source, "digest": corpus.digest,
                    "train": len(corpus.train), "test": len(corpus.test),
                },
                **training.summary(config),
                **found,
                "timing": {
                    "train_seconds": round(training.seconds, 2),
                    "steps_per_second": round(training.step / seconds, 4),
                    "bytes_per_second": round(training.step * config.bytes_per_step / seconds, 1),
                    "peak_memory_growth": cost.peak_memory_growth,
                },
                "wall_seconds": cost.wall_seconds,
                "show": {"bits": found["test"]["bits"]},
            }
        ]  # fmt: skip

    def clean_up(self, cell: Cell) -> None:
        scratch = self._scratch(cell)
        if scratch is not None and scratch.exists():
            shutil.rmtree(scratch)
            if not any(scratch.parent.iterdir()):
                scratch.parent.rmdir()

    def _scratch(self, cell: Cell) -> Path | None:
        """The folder for the checkpoint of an unfinished cell."""
        root = self.config.scratch
        return None if root is None else Path(root) / re.sub(r"[^\w.=-]+", "_", cell.id)


class Cost:
    """Wall time and peak memory of a cell over all its sessions, stored beside its checkpoint.

    Costs since the last ``save`` of a killed session are lost.
    """

    def __init__(self, device: str, scratch: Path | None) -> None:
        self._file = None if scratch is None else scratch / "cost.json"
        before = _read(self._file)
        self._wall_seconds: float = before.get("wall_seconds", 0.0)
        self.peak_memory_growth: int | None = before.get("peak_memory_growth")
        self._clock, self._memory = time.perf_counter(), PeakMemory(device)

    @property
    def wall_seconds(self) -> float:
        return round(self._wall_seconds + time.perf_counter() - self._clock, 3)

    def note_memory(self) -> None:
        """Include the memory of this session so far."""
        found = self._memory.growth()
        if found is not None:
            self.peak_memory_growth = max(found, self.peak_memory_growth or 0)

    def save(self) -> None:
        """Write the cost so far into the cell's folder, which the first checkpoint creates."""
        if self._file is not None:
            record = {"wall_seconds": self.wall_seconds, "peak_memory_growth": self.peak_memory_growth}
            write_atomically(self._file, dumps(record).encode())


def _read(file: Path | None) -> Record:
    return cast(Record, json.loads(file.read_text())) if file is not None and file.exists() else {}


@dataclass
class Training:
    """Progress and curves of a training run, stored in its checkpoints. Losses are in bits per byte."""

    step: int = 0
    losses: list[list[float]] = field(default_factory=list)
    """(step, mean training loss since the previous point)."""
    validations: list[list[float]] = field(default_factory=list)
    """(step, bits per byte of the first validation_bytes)."""
    step_sizes: list[list[float]] = field(default_factory=list)
    """(step, largest beta * lam on the first validation rows), for arms with raw keys."""
    nonfinite_steps: int = 0
    first_nonfinite: int | None = None
    ended_early: bool = False
    window: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self, config: LmConfig) -> Record:
        """The fields of the row that describe training."""
        return {
            "steps": self.step,
            "bytes_seen": self.step * config.bytes_per_step,
            "losses": [[step, float(f"{loss:.6g}")] for step, loss in self.losses],
            "validations": [[step, float(f"{bits:.6g}")] for step, bits in self.validations],
            "largest_step_sizes": self.step_sizes,
            "nonfinite_steps": self.nonfinite_steps,
            "first_nonfinite": self.first_nonfinite,
            "failed": self.nonfinite_steps > 0,
        }


def build(config: LmConfig, arm: str, seed: int) -> Any:
    """The model of an arm. Arms of equal shape start from equal weights."""
    torch.manual_seed(seed)
    model = EflaForCausalLM(presets.arm(arm, config.profile, backend=config.backend))
    return cast(Any, model).to(config.device)


def optimizer_of(config: LmConfig, model: Any) -> torch.optim.AdamW:
    return build_optimizer(model, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps)


def train(
    subject: Subject, rate: float, report: Report, scratch: Path | None = None, cost: Cost | None = None
) -> Training:
    """Train with AdamW on rows that depend only on the seed and the step, from the newest checkpoint in ``scratch``.

    A step with a non-finite loss or gradient changes no weights and is counted; ``max_nonfinite`` of them end the run.
    """
    config, model, corpus = subject.config, subject.model, subject.corpus
    cost = cost or Cost(config.device, scratch)
    engine = Engine.alone(config.device)
    optimizer = optimizer_of(config, model)
    sampler = RowSampler(corpus.stream("train"), length=config.length, rows=config.rows, seed=subject.seed)
    schedule = WarmupCosine.tenth(config.steps, rate)
    checkpoints = None if scratch is None else Checkpoints(scratch, engine, keep=1)
    training = Training()
    if checkpoints is not None and (newest := checkpoints.latest()) is not None:
        training = Training(**checkpoints.load(newest, model, optimizer)["progress"])
    window = max(1, config.steps // _CURVE_POINTS)
    last_save = time.perf_counter()
    while training.step < config.steps and not training.ended_early:
        clock, batch = time.perf_counter(), sampler.batch(training.step)
        result = train_step(
            model, optimizer, [batch], rate=schedule.rate(training.step), clip=config.clip, engine=engine
        )
        training.seconds += time.perf_counter() - clock
        training.step += 1
        is_last = training.step == config.steps
        training.window.append(result.loss / math.log(2))
        if not result.applied:
            training.nonfinite_steps += 1
            training.first_nonfinite = training.first_nonfinite or training.step
            training.ended_early = training.nonfinite_steps >= config.max_nonfinite
        if training.step % window == 0 or is_last:
            training.losses.append([training.step, math.fsum(training.window) / len(training.window)])
            training.window.clear()
        if training.step % config.validate_every == 0 or is_last:
            bits = subject.validate("validation", config.validation_bytes).bits_per_token
            training.validations.append([training.step, bits])
            if subject.arm in RAW_KEYS:
                layers = key_energies(model, subject.validation_rows())
                training.step_sizes.append([training.step, max(layer["step_size"][-1] for layer in layers)])
        if training.step % _STEPS_BETWEEN_REPORTS == 0:
            report(TRAINING_SHARE * training.step / config.steps, bits=result.loss / math.log(2))
        due = time.perf_counter() - last_save >= config.save_seconds
        if checkpoints is not None and (due or is_last or training.ended_early):
            checkpoints.save(training.step, model, optimizer, {"progress": dataclasses.asdict(training)})
            cost.note_memory()
            cost.save()
            last_save = time.perf_counter()
    cost.note_memory()
    return training


def measure(subject: Subject, report: Report, scratch: Path | None, cost: Cost) -> Record:
    """All measurements by name. Each is stored in ``scratch`` when it is made, and not made again."""
    file = None if scratch is None else scratch / "measured.json"
    found = _read(file)
    subject.model.eval()
    wanted = measurements(subject)
    for number, (name, function) in enumerate(wanted.items(), start=1):
        if name not in found:
            found[name] = function(subject)
            if file is not None:
                write_atomically(file, dumps(found).encode())
                cost.save()
        report(TRAINING_SHARE + (1 - TRAINING_SHARE) * number / len(wanted), bits=float(found["test"]["bits"]))
    return found


def _step(config: LmConfig, arm: str) -> Callable[[], object]:
    """One training step as a callable."""
    model = build(config, arm, 0)
    rows = torch.randint(1, 256, (config.rows, config.length), generator=torch.Generator().manual_seed(0))
    engine = Engine.alone(config.device)
    return partial(train_step, model, optimizer_of(config, model), [rows], rate=1e-4, engine=engine)


def _scored_bytes(config: LmConfig, seed: int) -> float:
    """Bytes that a cell reads in forward passes."""
    corpus = corpora.load(config.corpus, config.folder)
    test, validation = len(corpus.test), len(corpus.validation)
    total = test if config.test_bytes is None else min(config.test_bytes, test)
    total += min(config.final_validation_bytes or validation, validation)
    total += min(config.position_rows * POSITIONS * config.length, test)
    scored = total + config.steps / config.validate_every * config.validation_bytes
    if config.downstream:
        scored += _WIKITEXT if config.wikitext_items is None else config.wikitext_items * _WIKITEXT / 62
        scored += min(config.lambada_items or _PASSAGES, _PASSAGES) * _PASSAGE
        scored += config.choice_items * len(CHOICES) * _QUESTION if seed == config.choice_seed else 0
    return scored
