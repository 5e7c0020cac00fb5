"""Evaluation: the paper's tasks, perplexity in windows and with the state carried, loss by position, recall.

The scorers here need no lm-evaluation-harness; :mod:`efla.evaluation.harness` runs the same models through it.
"""

from __future__ import annotations

from efla.evaluation.likelihood import Request, Score, score
from efla.evaluation.perplexity import carried_log_likelihoods, rolling_log_likelihoods
from efla.evaluation.positions import bits_by_position, doubling_buckets, even_buckets, stream_bits
from efla.evaluation.scorer import Scorer, score_pairs
from efla.evaluation.tasks import lambada, multiple_choice, wikitext
from efla.models.tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "Request",
    "Score",
    "Scorer",
    "bits_by_position",
    "carried_log_likelihoods",
    "doubling_buckets",
    "even_buckets",
    "lambada",
    "multiple_choice",
    "rolling_log_likelihoods",
    "score",
    "score_pairs",
    "stream_bits",
    "wikitext",
]
