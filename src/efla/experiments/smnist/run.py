"""The sequential MNIST runs: one cell trains one arm and scores it; rows only, no figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from efla.experiments.experiment import Cell, Experiment, Report, grid_cells
from efla.experiments.smnist import data as smnist
from efla.experiments.smnist import lr_claims
from efla.experiments.smnist.config import SmnistConfig
from efla.experiments.smnist.model import AuthorsClassifier, Model, build, parameter_count
from efla.experiments.smnist.perturb import perturb
from efla.experiments.smnist.train import Data, Score, evaluate, step_distribution, summary, train
from efla.runs.provenance import backend_used
from efla.runs.records import Record


class SmnistRobustness(Experiment[SmnistConfig]):
    """Sequential MNIST under pixel dropout, intensity scaling and noise."""

    name = "smnist"
    title = "Sequential MNIST under corruption"
    config_class = SmnistConfig

    @classmethod
    def folder_name(cls) -> str:
        return "smnist"  # the learning-rate experiment reads the same runs

    def cells(self) -> list[Cell]:
        """Rates outermost and seeds in the middle, so that the first cells already compare all arms."""

        def settings(block: str, rate: float, seed: int, arm: str) -> Record:
            return {"block": block, "arm": arm, "rate": rate, "seed": seed}

        return grid_cells(self.config.groups, ("settings", "rates", "seeds", "arms"), settings)

    def prepare(self) -> None:
        data = smnist.load(self.config.dataset, self.config.folder)
        Data.of(data, self.config)

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        config, settings = self.config, cell.settings
        mnist, data = _data(config)
        model = build(config, settings["block"], settings["arm"], settings["seed"])
        result = train(model, data, config, settings["rate"], settings["seed"], report)
        model.eval()
        every = torch.from_numpy(data.test_x)
        picked = data.indices(config.clean_on)
        clean = evaluate(model, every[picked], data.test_y[picked])
        report(0.92, loss=result.losses[-1] if result.losses else float("nan"), accuracy=clean.accuracy)
        rows = []
        if settings["rate"] in config.perturbed_rates:
            images = config.perturbed_images(settings["block"], settings["arm"], settings["rate"])
            rows = self._corrupted(model, data, images, clean if images == config.clean_on else None, report)
        about = {"length": config.length, "steps": config.steps}
        rows = [row | about for row in rows]
        rows.append(
            about
            | {
                "parameters": parameter_count(model),
                "backend": backend_used(config.backend, width=config.width // config.heads),
                "clean_accuracy": clean.accuracy,
                "clean_nonfinite": clean.nonfinite,
                "clean_images": len(picked),
                "accuracies": result.accuracies,
                "data": {
                    "description": mnist.description, "digest": mnist.digest, "source": mnist.source,
                    "train": len(data.train_y), "test": len(data.test_y),
                },
                **summary(result, config),
                "show": {"loss": result.losses[-1] if result.losses else float("nan"), "accuracy": clean.accuracy},
            }
        )  # fmt: skip
        return rows

    def _corrupted(self, model: Model, data: Data, images: str, clean: Score | None, report: Report) -> list[Record]:
        """One row per kind and level: accuracy, share of non-finite rows, beta * lam; retention is relative to level one,
        at which nothing is corrupted (``clean`` is the score there, where it is known)."""
        picked, rows = data.indices(images), []
        labels = data.test_y[picked]
        total = sum(map(len, self.config.levels().values()))
        for kind, levels in self.config.levels().items():
            first = None
            for level in levels:
                x = torch.from_numpy(perturb(data.test_x, kind, level))
                score = evaluate(model, x[picked], labels) if clean is None or level != levels[0] else clean
                first = score.accuracy if first is None else first
                rows.append(
                    {
                        "row": "level", "kind": kind, "level": level, "accuracy": score.accuracy,
                        "retention": score.accuracy / first if first else None, "nonfinite": score.nonfinite,
                        "median_step_size": score.median_step_size, "largest_step_size": score.largest_step_size,
                        "images": len(labels),
                    }
                )  # fmt: skip
                if isinstance(model, AuthorsClassifier):
                    within = data.subset if images == "all" else slice(None)
                    rows[-1]["accuracy_test2k"] = float(score.right[within].double().mean())
                    rows[-1]["step_distribution"] = step_distribution(model, x[data.subset[::10]])
                report(0.92 + 0.08 * len(rows) / total, accuracy=score.accuracy)
        return rows


@cache
def _data(config: SmnistConfig) -> tuple[smnist.Mnist, Data]:
    mnist = smnist.load(config.dataset, config.folder)
    return mnist, Data.of(mnist, config)


class LearningRateRobustness(SmnistRobustness):
    """Loss and accuracy against the learning rate, from the same runs as the robustness experiment."""

    name = "lr"
    title = "Learning-rate robustness"

    @classmethod
    def plot(cls, rows: Sequence[Record], folder: Path) -> list[Path]:
        from efla.experiments.smnist import lr_plot

        return lr_plot.plot(rows, folder)

    @classmethod
    def text_summary(cls, rows: Sequence[Record]) -> str:
        return lr_claims.text_summary(rows)
