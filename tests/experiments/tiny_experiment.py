"""An experiment of small cells for the tests of the runner; workers find it as ``tiny_experiment:Tiny``."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from typing import Any

from efla.experiments.experiment import Cell, Experiment, Report
from efla.runs.records import GRID


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    factor: int = 3
    cells: int = field(default=6, metadata=GRID)
    bad: int | None = field(default=None, metadata=GRID)
    dying: int | None = field(default=None, metadata=GRID)
    hanging: int | None = field(default=None, metadata=GRID)


class Tiny(Experiment[TinyConfig]):
    """Each cell writes two points and a sum drawn from its seed."""

    name = "tiny_experiment:Tiny"
    title = "tiny"
    config_class = TinyConfig

    def cells(self) -> list[Cell]:
        return [Cell({"seed": seed}) for seed in range(self.config.cells)]

    def run_cell(self, cell: Cell, report: Report) -> list[dict[str, Any]]:
        seed = cell.settings["seed"]
        if seed == self.config.bad:
            raise ValueError("this cell is bad")
        if seed == self.config.dying:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.config.hanging is not None and seed >= self.config.hanging:
            signal.pause()
        for i in range(10):
            report(i / 10, loss=1.0 / (i + 1))
        draw = random.Random(seed).random() * self.config.factor
        points = [{"row": "point", "i": i, "value": draw * i} for i in range(2)]
        return [*points, {"sum": draw, "show": {"loss": draw}}]
