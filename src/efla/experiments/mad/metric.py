"""The two accuracies of MAD and its perplexity, over a test set in batches of 128 in order."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from efla.experiments.mad.model import targets_of
from efla.runs.records import Record

BATCH = 128


@dataclass(frozen=True)
class Score:
    """One evaluation of the whole test set.

    reference_accuracy: macro average per batch, mean over batches. token_accuracy: correct targets / targets.
    loss: mean negative log-likelihood of a target. perplexity: exp of each batch's mean, averaged over batches.
    """

    reference_accuracy: float
    token_accuracy: float
    loss: float
    perplexity: float

    def record(self) -> Record:
        return asdict(self)


NOTHING = Score(math.nan, math.nan, math.nan, math.nan)


def macro_recall(predicted: Tensor, wanted: Tensor, num_classes: int) -> float:
    """Mean over classes of tp / (tp + fn), over the classes that are predicted or wanted at least once.

    A class that is predicted but never wanted counts as 0. predicted, wanted: [n].
    """
    wanted_count = torch.bincount(wanted, minlength=num_classes)
    predicted_count = torch.bincount(predicted, minlength=num_classes)
    hits = torch.bincount(wanted[predicted == wanted], minlength=num_classes)
    present = (wanted_count + predicted_count) > 0
    recall = hits.double() / wanted_count.clamp(min=1)
    return float(recall[present].mean())


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, *, batch: int = BATCH) -> Score:
    """Score a model on inputs and targets, each [instances, L]; one whose loss is not a number has no score at all."""
    accuracy = perplexity = nll = 0.0
    right = count = 0
    for start in range(0, len(inputs), batch):
        part = slice(start, start + batch)
        where, wanted = targets_of(targets[part])
        logits = model(inputs[part], where).float()
        predicted = logits.argmax(1)
        mean = float(functional.cross_entropy(logits.double(), wanted))
        size = len(inputs[part])
        accuracy += size * macro_recall(predicted, wanted, logits.shape[1])
        perplexity += size * (math.exp(mean) if mean < 700 else math.inf)
        nll += mean * len(wanted)
        right += int((predicted == wanted).sum())
        count += len(wanted)
    if math.isnan(nll):
        return NOTHING
    return Score(accuracy / len(inputs), right / count, nll / count, perplexity / len(inputs))
