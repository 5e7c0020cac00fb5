"""What the harness logs for each item, reduced to what a comparison needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from efla.evaluation.items import metric_items


def item_records(task: str, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per item its number, hash, log-likelihoods and metrics, in the order of the data set."""
    found = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        record: dict[str, Any] = {"doc_id": sample["doc_id"], "doc_hash": sample.get("doc_hash", "")[:16]}
        answers = sample["filtered_resps"]
        if task == "wikitext":
            log_prob, words = sample["word_perplexity"]
            record |= {"log_prob": log_prob, "words": words, "bytes": sample["bits_per_byte"][1]}
        elif task == "lambada_openai":
            log_prob, is_greedy = answers[0]
            word = sample["arguments"][0][1]
            record |= {"log_prob": log_prob, "acc": float(is_greedy), "bytes": len(str(word).encode())}
        else:
            if all(isinstance(answer, (list, tuple)) for answer in answers):
                record["log_probs"] = [float(answer[0]) for answer in answers]
            record |= {m: float(sample[m]) for m in sample["metrics"] if isinstance(sample[m], (int, float, bool))}
        found.append(record)
    return found


def standard_errors(items: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, float]:
    """The standard error of each metric over items; of one that the items do not hold, not-a-number."""
    known = {"acc", "acc_norm", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"}
    found = {}
    for metric in metrics:
        if metric in known and (metric in items[0] or "log_prob" in items[0]):
            found[metric] = metric_items(items, metric).standard_error()
        elif metric in items[0]:
            values = np.array([item[metric] for item in items])
            found[metric] = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
        else:
            found[metric] = math.nan
    return found
