"""Exact Flow Linear Attention: linear-time attention whose memory update solves the delta rule's equation exactly."""

# ruff: noqa: E402
import importlib
from typing import TYPE_CHECKING, Any

from efla.interruption import guard_start

guard_start()  # first: what follows imports torch

from efla import ops, rules
from efla.errors import BackendUnavailable
from efla.models import register_with_transformers
from efla.phi import phi1
from efla.scans.api import linear_attention, scan
from efla.scans.backends import backends
from efla.scans.validation import set_validation, validation

if TYPE_CHECKING:
    from efla import layers, models
    from efla.models import presets
    from efla.models.configuration_efla import EflaConfig
    from efla.models.modeling_efla import EflaForCausalLM, EflaForSequenceClassification, EflaModel

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
    "validation",
]

# Imported on first use: they need transformers, the scans do not.
_MODELS = ("EflaConfig", "EflaForCausalLM", "EflaForSequenceClassification", "EflaModel")
_MODULES = {"layers": "efla.layers", "models": "efla.models", "presets": "efla.models.presets"}


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        return getattr(importlib.import_module("efla.models"), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'efla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODELS, *_MODULES})


register_with_transformers()
