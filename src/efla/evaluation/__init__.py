"""Evaluation: lm-evaluation-harness tasks, perplexity in windows or with a carried state, loss by position, recall.

:mod:`efla.evaluation.run` is ``efla eval``, :mod:`efla.evaluation.harness` runs models in lm-evaluation-harness; the names
below work without it.
"""

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
