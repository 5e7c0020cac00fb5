"""The experiments by name: each is a folder with a typed config, ``run.py``, ``plot.py`` and a README."""

from __future__ import annotations

import importlib
from typing import Any, cast

from efla.errors import unknown_name
from efla.experiments.experiment import Experiment

__all__ = ["get", "names"]

# Name -> (module, class). The module is imported when the experiment is asked for.
_EXPERIMENTS = {
    "exactness": ("efla.experiments.exactness.run", "Exactness"),
    "smnist": ("efla.experiments.smnist.run", "SmnistRobustness"),
    "mad": ("efla.experiments.mad.run", "Mad"),
    "lm": ("efla.experiments.lm.run", "LanguageModels"),
    "throughput": ("efla.experiments.throughput.run", "Throughput"),
    "lr": ("efla.experiments.smnist.run", "LearningRateRobustness"),
}


def names() -> list[str]:
    """Names of all experiments."""
    return list(_EXPERIMENTS)


def get(name: str) -> type[Experiment[Any]]:
    """The experiment class of that name; ``module:Class`` finds one of your own, without registering it here."""
    if ":" in name:
        module, class_name = name.split(":", 1)
        return cast("type[Experiment[Any]]", getattr(importlib.import_module(module), class_name))
    if name not in _EXPERIMENTS:
        raise unknown_name("experiment", name, _EXPERIMENTS)
    module, class_name = _EXPERIMENTS[name]
    return cast("type[Experiment[Any]]", getattr(importlib.import_module(module), class_name))
