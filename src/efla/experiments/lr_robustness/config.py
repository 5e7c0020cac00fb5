"""The learning-rate experiment reads the sequential MNIST runs, so its config is theirs."""

from __future__ import annotations

from efla.experiments.smnist_robustness.config import RATES, SmnistConfig
from efla.experiments.smnist_robustness.options import Lr

__all__ = ["RATES", "Lr", "SmnistConfig"]
