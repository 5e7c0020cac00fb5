"""Evaluation: lm-evaluation-harness tasks, perplexity in windows or with a carried state, loss by position, recall.

:mod:`efla.evaluation.run` is ``efla eval``, :mod:`efla.evaluation.harness` runs models in lm-evaluation-harness; the names
below work without it. They are imported with their first use, and torch with them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efla.evaluation.likelihood import ContinuationScore, Request, score
    from efla.evaluation.perplexity import (
        bits_by_position,
        carried_log_likelihoods,
        doubling_buckets,
        even_buckets,
        rolling_log_likelihoods,
    )
    from efla.models.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "ContinuationScore",
    "Request",
    "bits_by_position",
    "carried_log_likelihoods",
    "doubling_buckets",
    "even_buckets",
    "rolling_log_likelihoods",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = ("efla.evaluation.likelihood", "efla.evaluation.perplexity", "efla.models.tokenizer")
    return next(vars(module)[name] for module in map(import_module, modules) if name in vars(module))
