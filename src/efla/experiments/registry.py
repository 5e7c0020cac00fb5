"""The experiments by name. To add one, write its folder and add one line to ``_EXPERIMENTS``."""

import pkgutil
from typing import Any

from efla.errors import check_names
from efla.experiments.experiment import Experiment, Options

# Name -> (experiment class, options class), imported on use. In the order of `efla reproduce all`: throughput comes early,
# while the machine is cool.
_EXPERIMENTS = {
    "exactness": ("exactness.run:Exactness", "exactness.config:ExactnessOptions"),
    "throughput": ("throughput.run:Throughput", "throughput.config:ThroughputOptions"),
    "smnist": ("smnist.run:SmnistRobustness", "smnist.config:SmnistOptions"),
    "lr": ("smnist.run:LearningRateRobustness", "smnist.config:LrOptions"),
    "mad": ("mad.run:Mad", "mad.config:MadOptions"),
    "lm": ("lm.run:LanguageModels", "lm.config:LmOptions"),
}


def names() -> list[str]:
    """Names of all experiments."""
    return list(_EXPERIMENTS)


def get(name: str) -> type[Experiment[Any]]:
    """The experiment class of that name. ``module:Class`` finds an experiment that is not registered."""
    found: type[Experiment[Any]] = pkgutil.resolve_name(name if ":" in name else _path(name, 0))
    return found


def options_class(name: str) -> type[Options]:
    """The class of an experiment's command-line options."""
    found: type[Options] = pkgutil.resolve_name(_path(name, 1))
    return found


def name_of(options: Options) -> str:
    """The name of the experiment that these options belong to."""
    return next(name for name in _EXPERIMENTS if type(options) is options_class(name))


def _path(name: str, which: int) -> str:
    check_names("experiment", [name], _EXPERIMENTS)
    return f"efla.experiments.{_EXPERIMENTS[name][which]}"
