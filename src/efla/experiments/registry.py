"""The experiments by name. To add one, write its folder and add one line to ``_EXPERIMENTS``."""

import importlib
from typing import Any

from efla.errors import check_names
from efla.experiments.experiment import Experiment, Options

# Name -> (package, experiment class, options class), imported on use. In the order of `efla reproduce all`: throughput
# comes early, while the machine is cool.
_EXPERIMENTS = {
    "exactness": ("efla.experiments.exactness", "run:Exactness", "config:ExactnessOptions"),
    "throughput": ("efla.experiments.throughput", "run:Throughput", "config:ThroughputOptions"),
    "smnist": ("efla.experiments.smnist", "run:SmnistRobustness", "config:SmnistOptions"),
    "lr": ("efla.experiments.smnist", "run:LearningRateRobustness", "config:LrOptions"),
    "mad": ("efla.experiments.mad", "run:Mad", "config:MadOptions"),
    "lm": ("efla.experiments.lm", "run:LanguageModels", "config:LmOptions"),
}


def names() -> list[str]:
    """Names of all experiments."""
    return list(_EXPERIMENTS)


def get(name: str) -> type[Experiment[Any]]:
    """The experiment class of that name. ``module:Class`` finds an experiment that is not registered."""
    if ":" not in name:
        package, experiment, _ = _find(name)
        name = f"{package}.{experiment}"
    found: type[Experiment[Any]] = _load(name)
    return found


def options_class(name: str) -> type[Options]:
    """The class of an experiment's command-line options."""
    package, _, options = _find(name)
    found: type[Options] = _load(f"{package}.{options}")
    return found


def name_of(options: Options) -> str:
    """The name of the experiment that these options belong to."""
    return next(name for name in _EXPERIMENTS if type(options) is options_class(name))


def _find(name: str) -> tuple[str, str, str]:
    check_names("experiment", [name], _EXPERIMENTS)
    return _EXPERIMENTS[name]


def _load(path: str) -> Any:
    module, _, class_name = path.partition(":")
    return getattr(importlib.import_module(module), class_name)
