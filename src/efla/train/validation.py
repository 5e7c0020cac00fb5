"""The loss on held-out text: consecutive rows, each scored from its second token on, memory reset per row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from efla.data.streams import TokenStream, consecutive_rows
from efla.train.engine import Engine
from efla.train.step import num_labels, row_loss


@dataclass(frozen=True)
class Validation:
    """Mean loss in nats over ``tokens`` predicted tokens."""

    loss: float
    tokens: int

    @property
    def bits_per_token(self) -> float:
        """Bits per byte where bytes are tokens."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def validate(
    model: nn.Module,
    stream: TokenStream,
    *,
    length: int,
    rows: int = 8,
    limit: int | None = None,
    border: int | None = None,
    precision: str = "float32",
    engine: Engine | None = None,
) -> Validation:
    """Score the first ``limit`` tokens of a stream (default all) in rows of ``length``, shared by the engine's ranks.

    border: token before which the memory is reset, as in training.
    """
    engine = engine or Engine.alone()
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    batches = list(consecutive_rows(stream, length, rows, limit))
    if engine.sequence_world > 1:  # a shorter row does not divide
        batches = [batch for batch in batches if batch.shape[1] == length]
    for first in range(0, len(batches), engine.data_world):
        number = first + engine.data_rank
        # Every rank runs as many forward passes, since sharded weights are gathered in them; a spare one counts nothing.
        batch = batches[min(number, len(batches) - 1)]
        loss = float(row_loss(model, batch, 1, border=border, precision=precision, engine=engine))
        if number < len(batches):
            total += loss
            count += num_labels(batch, border)
    model.train(was_training)
    summed, counted = engine.sum([total, count])
    counted /= engine.sequence_world
    if not counted:
        raise ValueError(f"the validation text has {len(stream)} tokens, too few for one to be predicted")
    return Validation(summed / counted, round(counted))
