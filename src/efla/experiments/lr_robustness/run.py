"""The learning-rate experiment: the cells of sequential MNIST, all five rates; figures of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efla.experiments.framework.experiment import Record
from efla.experiments.smnist_robustness.run import SmnistRobustness


class LearningRateRobustness(SmnistRobustness):
    """Loss and accuracy against the learning rate, from the same runs as the robustness experiment."""

    name = "lr"
    title = "Learning-rate robustness"

    @classmethod
    def plot(cls, rows: Sequence[Record], folder: Path) -> list[Path]:
        from efla.experiments.lr_robustness.plot import plot

        return plot(rows, folder)

    @classmethod
    def text_summary(cls, rows: Sequence[Record]) -> str:
        from efla.experiments.lr_robustness.claims import text_summary

        return text_summary(rows)
