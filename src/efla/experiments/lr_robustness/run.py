"""The learning-rate experiment: the cells of sequential MNIST, all five rates; figures of its own."""

from __future__ import annotations

from efla.experiments.smnist_robustness.run import SmnistRobustness


class LearningRateRobustness(SmnistRobustness):
    """Loss and accuracy against the learning rate, from the same runs as the robustness experiment."""

    name = "lr"
    title = "Learning-rate robustness"
