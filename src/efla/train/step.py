"""One optimizer step: losses and gradients of the micro-batches, clipping, and a check before anything is changed.

Shapes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from efla.data.streams import document_borders
from efla.models.modeling_efla import IGNORED
from efla.train.engine import Engine
from efla.train.optimizer import set_rate


@dataclass(frozen=True)
class StepResult:
    """What a step did. loss: mean over all labels of all ranks, in nats; norm: of the gradient, before clipping.

    applied: False if the loss or the norm was not finite, in which case no parameter was changed.
    stop: whether any rank asked to stop (a signal, for one).
    """

    loss: float
    norm: float
    applied: bool
    stop: bool = False


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Tensor],
    *,
    rate: float,
    clip: float = 1.0,
    border: int | None = None,
    precision: str = "float32",
    engine: Engine | None = None,
    stop: Callable[[], bool] | None = None,
) -> StepResult:
    """AdamW on the mean next-token loss over ``micro_batches``, each [B, T] token ids; over all ranks of the engine.

        loss = (1 / labels) sum of -log p(next token),      gradient clipped to the global norm ``clip``

    The labels of all micro-batches and ranks are counted first, so that the gradient is that of the one mean whatever
    the cut. border: token before which the memory is reset (``None``: it is carried over).
    stop: asked at the end whether all ranks should stop.
    """
    engine = engine or Engine.alone()
    model.train()
    optimizer.zero_grad(set_to_none=True)
    labels = engine.count(sum(num_labels(rows, border) for rows in micro_batches))
    total = torch.zeros((), device=engine.device, dtype=torch.float64)
    for number, rows in enumerate(micro_batches):
        with engine.accumulating(model, is_last=number == len(micro_batches) - 1):
            loss = row_loss(model, rows, labels, border=border, precision=precision, engine=engine)
            # Gradients are averaged over ranks, the loss is a sum over them.
            (loss * engine.world).backward()
        total += loss.detach()
    norm = _value(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
    mean, stops = engine.sum([float(total), float(stop is not None and stop())])
    applied = math.isfinite(mean) and math.isfinite(norm)
    if applied:
        set_rate(optimizer, rate)
        optimizer.step()
    else:
        optimizer.zero_grad(set_to_none=True)
    return StepResult(loss=mean, norm=norm, applied=applied, stop=stops > 0)


def row_loss(
    model: nn.Module,
    rows: Tensor,
    labels: int,
    *,
    border: int | None = None,
    precision: str = "float32",
    engine: Engine | None = None,
) -> Tensor:
    """Summed next-token loss of rows [B, T] over ``labels``, this rank's part of each row where rows are split."""
    engine = engine or Engine.alone()
    arguments: dict[str, Any] = {}
    if engine.sequence_world > 1:
        shifted = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=IGNORED)
        arguments["shift_labels"] = engine.sequence_part(shifted).to(engine.device)
        rows = engine.sequence_part(rows).to(engine.device)
    else:
        if border is not None:
            arguments["cu_seqlens"] = document_borders(rows, border).to(engine.device)
        rows = rows.to(engine.device)
        arguments["labels"] = rows
    with engine.autocast(precision):
        output = model(
            input_ids=rows, num_items_in_batch=labels, use_cache=False, skip_logits=True, return_dict=True, **arguments
        )
    loss: Tensor = output.loss
    return loss


def num_labels(rows: Tensor, border: int | None) -> int:
    """Tokens that are predicted: all but the first of each row, and of each document where the memory is reset."""
    if border is None:
        return rows.shape[0] * (rows.shape[1] - 1)
    return rows.numel() - (document_borders(rows, border).numel() - 1)


def _value(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
