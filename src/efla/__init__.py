"""Exact Flow Linear Attention: linear-time attention whose memory update solves the delta rule's equation exactly."""

import importlib
from typing import TYPE_CHECKING, Any

from efla.interruption import guard_start
from efla.models import register_when_loaded

if TYPE_CHECKING:
    from efla import layers, models, ops, rules, state
    from efla.errors import BackendUnavailable
    from efla.models import presets
    from efla.models.configuration_efla import EflaConfig
    from efla.models.modeling_efla import EflaForCausalLM, EflaForSequenceClassification, EflaModel
    from efla.phi import phi1
    from efla.scans.api import linear_attention, scan
    from efla.scans.backends import backends
    from efla.scans.validation import set_validation, validation

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "EflaConfig",
    "EflaForCausalLM",
    "EflaForSequenceClassification",
    "EflaModel",
    "backends",
    "layers",
    "linear_attention",
    "models",
    "ops",
    "phi1",
    "presets",
    "rules",
    "scan",
    "set_validation",
    "state",
    "validation",
]

# Imported with their first use, and torch with them. Name -> the module that defines it; all other names are modules.
_DEFINED_IN = {
    "BackendUnavailable": "efla.errors",
    "EflaConfig": "efla.models.configuration_efla",
    "EflaForCausalLM": "efla.models.modeling_efla",
    "EflaForSequenceClassification": "efla.models.modeling_efla",
    "EflaModel": "efla.models.modeling_efla",
    "backends": "efla.scans.backends",
    "linear_attention": "efla.scans.api",
    "phi1": "efla.phi",
    "scan": "efla.scans.api",
    "set_validation": "efla.scans.validation",
    "validation": "efla.scans.validation",
}
_MODULES = {"presets": "efla.models.presets"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'efla' has no attribute {name!r}")
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    else:
        value = importlib.import_module(_MODULES.get(name, f"efla.{name}"))
    globals()[name] = value
    register_when_loaded()
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


guard_start()
register_when_loaded()
