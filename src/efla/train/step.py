"""One optimizer step, and the loss on held-out text.

Shapes: B rows of a micro-batch, T tokens of a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from efla.data.sampling import TokenStream, consecutive_rows, document_boundaries
from efla.models.modeling_efla import IGNORED
from efla.train.engine import ALONE, Engine
from efla.train.optimizer import set_rate


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. loss: mean over all labels of all ranks, in nats; norm: of the gradient, before clipping.

    applied: False if the loss or the norm is not finite; the parameters are then unchanged.
    stop: whether any rank asked to stop, for example after a signal.
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
    bos_token: int | None = None,
    precision: str = "float32",
    engine: Engine = ALONE,
    stop: Callable[[], bool] | None = None,
) -> StepResult:
    """AdamW on the mean next-token loss over ``micro_batches``, each [B, T] token ids; over all ranks of the engine.

        loss = (1 / labels) sum of -log p(next token),      gradient clipped to the global norm ``clip``

    All labels are counted first, so the gradient does not depend on how a step is split into micro-batches and ranks.
    bos_token: the memory is reset before this token (``None``: it is carried over). stop: whether to stop all ranks;
    called at the end of the step.
    """
    model.train()
    optimizer.zero_grad(set_to_none=True)
    labels = engine.count_labels(sum(num_labels(rows, bos_token) for rows in micro_batches))
    total = torch.zeros((), device=engine.device, dtype=torch.float64)
    for number, rows in enumerate(micro_batches):
        with engine.accumulating(model, is_last=number == len(micro_batches) - 1):
            loss = row_loss(model, rows, labels, bos_token=bos_token, precision=precision, engine=engine)
            # Gradients are averaged over ranks, but the loss is a sum over them.
            (loss * engine.world).backward()
        total += loss.detach()
    norm = _value(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
    mean, stops = engine.all_reduce_sum([float(total), float(stop is not None and stop())])
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
    bos_token: int | None = None,
    precision: str = "float32",
    engine: Engine = ALONE,
) -> Tensor:
    """Sum of the next-token losses of rows [B, T], divided by ``labels``; of this rank's part where rows are split."""
    arguments: dict[str, Any] = {}
    if engine.sequence is not None:
        shifted = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=IGNORED)
        arguments["shift_labels"] = engine.sequence.part(shifted).to(engine.device)
        rows = engine.sequence.part(rows).to(engine.device)
    else:
        if bos_token is not None:
            arguments["cu_seqlens"] = document_boundaries(rows, bos_token).to(engine.device)
        rows = rows.to(engine.device)
        arguments["labels"] = rows
    with engine.autocast(precision):
        output = model(
            input_ids=rows, num_items_in_batch=labels, use_cache=False, skip_logits=True, return_dict=True, **arguments
        )
    loss: Tensor = output.loss
    return loss


def num_labels(rows: Tensor, bos_token: int | None) -> int:
    """Tokens to predict: all but the first of each row, and of each document if the memory is reset."""
    if bos_token is None:
        return rows.shape[0] * (rows.shape[1] - 1)
    return rows.numel() - (document_boundaries(rows, bos_token).numel() - 1)


@dataclass(frozen=True)
class Validation:
    """Mean loss on held-out text, in nats, over ``tokens`` predicted tokens."""

    loss: float
    tokens: int

    @property
    def bits_per_token(self) -> float:
        """Bits per byte if tokens are bytes."""
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
    bos_token: int | None = None,
    precision: str = "float32",
    engine: Engine = ALONE,
) -> Validation:
    """Score the first ``limit`` tokens of a stream (default all) in consecutive rows of ``length``, shared by the ranks.

    Every row starts with an empty memory and is scored from its second token on. bos_token: as in :func:`train_step`.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    batches = list(consecutive_rows(stream, length, rows, limit))
    if engine.sequence_world > 1:  # a shorter row cannot be split
        batches = [batch for batch in batches if batch.shape[1] == length]
    for first in range(0, len(batches), engine.data_world):
        number = first + engine.data_rank
        # All ranks run the same number of forward passes, which gather sharded weights; extra ones are not counted.
        batch = batches[min(number, len(batches) - 1)]
        loss = float(row_loss(model, batch, 1, bos_token=bos_token, precision=precision, engine=engine))
        if number < len(batches):
            total += loss
            count += num_labels(batch, bos_token)
    model.train(was_training)
    summed, counted = engine.all_reduce_sum([total, count])
    counted /= engine.sequence_world
    if not counted:
        raise ValueError(f"the validation text has {len(stream)} tokens, too few to predict one")
    return Validation(summed / counted, round(counted))


def _value(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
