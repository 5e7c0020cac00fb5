"""The language-model runs: one cell trains one arm with one rate and seed and measures it; rows only, no figures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from efla.data import corpora
from efla.evaluation.tasks import SOURCES, find_file, require_lm_eval
from efla.experiments.experiment import Cell, Experiment, Report, grid_cells
from efla.experiments.lm.config import LmConfig
from efla.experiments.lm.cost import Cost
from efla.experiments.lm.measure import Subject, measure
from efla.experiments.lm.train import build, summary, train
from efla.runs.provenance import backend_used
from efla.runs.records import Record

IN_PROGRESS = "in-progress"


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
        """Group by group, arms innermost, so that the first cells already compare them."""

        def settings(rate: float, seed: int, arm: str) -> Record:
            return {"arm": arm, "rate": rate, "seed": seed}

        return grid_cells(self.config.groups, ("rates", "seeds", "arms"), settings)

    def with_output(self, output: Path) -> LanguageModels:
        return LanguageModels(replace(self.config, scratch=str((output / IN_PROGRESS).resolve())))

    def prepare(self) -> None:
        corpora.load(self.config.corpus, self.config.folder)
        if self.config.downstream:
            assert self.config.folder is not None
            require_lm_eval()
            for task, source in SOURCES.items():
                for name in source.files:
                    find_file(Path(self.config.folder), name, task)

    @property
    def gpus_per_cell(self) -> float:
        return 1.0 if self.config.device.startswith("cuda") else 0.0

    def expected_seconds(self, cells: Sequence[Cell], threads: int) -> list[float] | None:
        if self.config.device.startswith("cuda") and not torch.cuda.is_available():
            return None  # the cells run elsewhere
        from efla.experiments.lm.speed import expected_seconds

        return expected_seconds(self.config, cells, threads)

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        config, chosen = self.config, cell.settings
        corpus = corpora.load(config.corpus, config.folder)
        scratch = self._scratch(cell)
        cost = Cost(config.device, scratch)
        model = build(config, chosen["arm"], chosen["seed"])
        progress = train(
            model,
            corpus,
            config,
            arm=chosen["arm"],
            rate=chosen["rate"],
            seed=chosen["seed"],
            report=report,
            scratch=scratch,
            cost=cost,
        )
        found = measure(Subject(model, chosen["arm"], chosen["seed"], corpus, config), scratch, report, cost)
        return [
            {
                "profile": config.profile,
                "parameters": sum(p.numel() for p in model.parameters()),
                "backend": "torch" if chosen["arm"] == "attention" else backend_used(config.backend, config.device),
                "data": {
                    "corpus": corpus.name,
                    "source": corpus.source,
                    "digest": corpus.digest,
                    "train": len(corpus.train),
                    "test": len(corpus.test),
                },
                **summary(progress, config),
                **found,
                "timing": {
                    "train_seconds": round(progress.seconds, 2),
                    "steps_per_second": round(progress.step / max(progress.seconds, 1e-9), 4),
                    "bytes_per_second": round(progress.step * config.bytes_per_step / max(progress.seconds, 1e-9), 1),
                    "peak_memory_growth": cost.peak_memory_growth,
                },
                "wall_seconds": cost.wall_seconds,
                "show": {"bits": found["test"]["bits"]},
            }
        ]

    def clean_up(self, cell: Cell) -> None:
        scratch = self._scratch(cell)
        if scratch is not None and scratch.exists():
            shutil.rmtree(scratch)
            if not any(scratch.parent.iterdir()):
                scratch.parent.rmdir()

    def _scratch(self, cell: Cell) -> Path | None:
        """Where an unfinished cell keeps its checkpoint."""
        root = self.config.scratch
        return None if root is None else Path(root) / re.sub(r"[^\w.=-]+", "_", cell.id)
