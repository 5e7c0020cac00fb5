"""Models that transformers loads as its own: ``EflaConfig``, ``EflaModel``, ``EflaForCausalLM`` and a classifier.

Imported lazily: ``import efla`` does not import transformers.
"""

from __future__ import annotations

from efla.models.registration import lazy_attribute

__all__ = ["EflaConfig", "EflaForCausalLM", "EflaForSequenceClassification", "EflaModel"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return lazy_attribute(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
