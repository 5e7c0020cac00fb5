"""Multi-query associative recall (MQAR): key-value pairs, then keys whose values the model should predict.

    k1 v1 k2 v2 ... kn vn   f f k3 v3 f k1 v1 f f f k2 v2 ...

Keys and values are distinct random tokens; f are other keys. After the pairs each key occurs once more, in random order at
random places, followed by its value. Adapted from Arora et al. (Zoology, 2023): every pair is queried exactly once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from efla.runs.timing import training_step


@dataclass(frozen=True)
class RecallBatch:
    """tokens [B, T]; the n queried values are at ``positions`` [B, n]; ``values`` [B, n] are the candidates."""

    tokens: Tensor
    positions: Tensor
    values: Tensor

    def to(self, device: torch.device, rows: slice = slice(None)) -> RecallBatch:
        """Some rows of the batch, on a device."""
        return RecallBatch(*(x[rows].to(device) for x in (self.tokens, self.positions, self.values)))


@dataclass(frozen=True)
class RecallResult:
    """Share of queried values that are the most likely of all tokens, and of the sequence's values (chance 1 / pairs).

    Standard errors are over sequences.
    """

    accuracy: float
    accuracy_error: float
    among_values: float
    among_values_error: float
    num_sequences: int


def make_batch(
    usable: Sequence[int], num_pairs: int, length: int, num_sequences: int, seed: int, prefix: int | None = None
) -> RecallBatch:
    """Random sequences of ``length`` tokens.

    usable: token ids to draw from; the first half are keys, the second half values.
    prefix: a token before each sequence, not counted in its length.
    """
    half = len(usable) // 2
    if num_pairs < 1 or num_pairs > half - 1:
        raise ValueError(f"{num_pairs} pairs need at least {2 * num_pairs + 2} usable tokens, there are {len(usable)}")
    if length < 4 * num_pairs:
        raise ValueError(f"{num_pairs} pairs take {2 * num_pairs} tokens and as many again to ask; length is {length}")
    generator = np.random.default_rng([seed, num_pairs, length])
    keys, values = np.asarray(usable[:half]), np.asarray(usable[half : 2 * half])
    rows, places, candidates = [], [], []
    for _ in range(num_sequences):
        drawn = generator.permutation(keys)
        own_keys, fillers = drawn[:num_pairs], drawn[num_pairs:]
        own_values = generator.permutation(values)[:num_pairs]
        row, at = _row(own_keys, own_values, fillers, length, generator)
        rows.append(row if prefix is None else np.concatenate([[prefix], row]))
        places.append(at + (0 if prefix is None else 1))
        candidates.append(own_values)
    return RecallBatch(*(torch.from_numpy(np.stack(x).astype(np.int64)) for x in (rows, places, candidates)))


def _row(
    keys: NDArray[Any], values: NDArray[Any], fillers: NDArray[Any], length: int, generator: np.random.Generator
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One sequence and the positions of its queried values."""
    n = len(keys)
    row = np.empty(length, dtype=np.int64)
    row[0 : 2 * n : 2], row[1 : 2 * n : 2] = keys, values
    row[2 * n :] = generator.choice(fillers, length - 2 * n)
    # n queries of two tokens in the rest: choose n places of the length without their values, then make room for those.
    starts = np.sort(generator.permutation(length - 3 * n)[:n]) + np.arange(n) + 2 * n
    order = generator.permutation(n)
    row[starts], row[starts + 1] = keys[order], values[order]
    return row, starts + 1


@torch.no_grad()
def recall(
    model: Any, batch: RecallBatch, *, batch_tokens: int = 8192, progress: Callable[[int], None] | None = None
) -> RecallResult:
    """Recall of the model, from one pass over each sequence."""
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // batch.tokens.shape[1])
    right, among = [], []
    for at in range(0, len(batch.tokens), rows):
        part = batch.to(device, slice(at, at + rows))
        asked, target = _asked(model, part.tokens, part.positions)
        right.append((asked.argmax(-1) == target).double().mean(1))
        candidates = asked.gather(2, part.values[:, None, :].expand(-1, asked.shape[1], -1))
        chosen = part.values.gather(1, candidates.argmax(-1))
        among.append((chosen == target).double().mean(1))
        if progress is not None:
            progress(len(target))
    whole, own = torch.cat(right).cpu().numpy(), torch.cat(among).cpu().numpy()
    return RecallResult(*_mean(whole), *_mean(own), len(whole))


def _asked(model: Any, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, n, V] before each queried value, and the values [B, n]."""
    logits = model(input_ids=tokens, use_cache=False).logits
    index = (positions - 1)[..., None].expand(-1, -1, logits.shape[-1])
    return logits.gather(1, index), tokens.gather(1, positions)


def finetune_on_recall(
    model: Any,
    usable: Sequence[int],
    grid: Sequence[tuple[int, int]],
    *,
    steps: int,
    seed: int,
    prefix: int | None = None,
    rate: float = 1e-3,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """A copy of the model trained on recall, cycling through the settings (pairs, length) of ``grid``.

    Models of text were not trained to recall random tokens; the same number of steps for each makes them comparable. Uses
    AdamW on the loss at the queried values, with a rate that warms up over the first tenth and decays linearly to zero.
    """
    if steps < 1 or not grid:
        raise ValueError(
            f"fine-tuning needs at least one step and one setting, got {steps} steps and {len(grid)} settings"
        )
    copied = copy.deepcopy(model)
    device = next(copied.parameters()).device
    optimizer = torch.optim.AdamW(copied.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / max(1, steps // 10), (steps - t) / steps)
    )
    for step in range(steps):
        num_pairs, length = grid[step % len(grid)]
        count = max(1, batch_tokens // length)
        # Training and measuring use different seeds.
        batch = make_batch(usable, num_pairs, length, count, seed + 1_000_003 * (step + 1), prefix)
        training_step(copied, optimizer, partial(_loss, copied, batch.to(device)), clip=1.0)()
        schedule.step()
        if progress is not None:
            progress(1)
    return copied.eval()


def _loss(model: Any, batch: RecallBatch) -> Tensor:
    asked, target = _asked(model, batch.tokens, batch.positions)
    return functional.cross_entropy(asked.flatten(0, 1).float(), target.flatten())


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def usable_tokens(vocab_size: int, special: Sequence[int], limit: int = 2048) -> list[int]:
    """At most ``limit`` token ids that are not special, evenly spaced over the vocabulary."""
    ids = [i for i in range(vocab_size) if i not in set(special)]
    if len(ids) <= limit:
        return ids
    return [ids[int(i)] for i in np.linspace(0, len(ids) - 1, limit)]
