"""Log-likelihoods of continuations, batched by length, with one prefill for continuations that share a prefix.

A request is a sequence of tokens of which the last ``num_scored`` are scored:

    log p = sum over those t of log p(token_t | tokens before t)

Requests of one group (the choices of a question) share one pass over their common prefix; each continuation starts from a
copy of the state after it. The scores equal those of separate passes.
"""

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla import state
from efla.models.cache import cached_state_bytes, why_not_recurrent

MIN_SHARED = 8
"""Shortest common prefix that gets its own pass."""

PASS_TOKENS = 128
"""Fixed cost of a forward pass, in tokens; batches are split where padding would cost more."""

WAITING_BYTES = 2**27
"""States held before their continuations run; a single prefill may exceed it."""

MAX_LOGITS = 2**26
"""Logits held at once: 256 MB in float32, 2,097 tokens of a vocabulary of 32,000."""

HALF_DTYPES = (torch.float16, torch.bfloat16)


class ContinuationScore(NamedTuple):
    """Summed log-probability (nats) of the scored tokens, and whether each was the most likely one."""

    log_prob: float
    is_greedy: bool


Scores = list[tuple[int, ContinuationScore]]
"""(index of the request, its score)."""


@dataclass(frozen=True)
class Request:
    """A sequence whose last ``num_scored`` tokens are scored. Requests of one ``group`` may share a prefill."""

    tokens: Sequence[int]
    num_scored: int
    group: Hashable = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.tokens):
            raise ValueError(
                f"a request scores at least one token after at least one token of context, got {self.num_scored} scored of "
                f"{len(self.tokens)}; put the model's bos before a text without context"
            )


@torch.no_grad()
def score(
    model: Any,
    requests: Sequence[Request],
    *,
    share: bool = True,
    batch_tokens: int = 4096,
    done: Callable[[Scores], None] | None = None,
) -> list[ContinuationScore]:
    """The score of every request, in order.

    share: read the common prefix of a group once.
    batch_tokens: tokens in one forward pass, including padding; longer sequences run alone.
    done: called after each pass with (index, score) of the finished requests.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    scorer = _Scorer(model, requests, batch_tokens)
    families, singles = families_and_singles(requests, share and scorer.can_share)
    scores: dict[int, ContinuationScore] = {}
    for finished in itertools.chain(scorer.families(families), scorer.singles(singles)):
        scores.update(finished)
        if done is not None:
            done(finished)
    return [scores[index] for index in range(len(requests))]


class _Family(NamedTuple):
    """Indices of requests whose sequences start with the same ``shared`` tokens."""

    members: list[int]
    shared: int


def families_and_singles(requests: Sequence[Request], share: bool) -> tuple[list[_Family], list[int]]:
    """Groups with at least MIN_SHARED common tokens before the first scored one, and all other requests."""
    groups: dict[Hashable, list[int]] = {}
    singles = []
    for index, request in enumerate(requests):
        if share and request.group is not None:
            groups.setdefault(request.group, []).append(index)
        else:
            singles.append(index)
    families = []
    for members in groups.values():
        shared = shared_length([requests[i] for i in members])
        if len(members) > 1 and shared >= MIN_SHARED:
            families.append(_Family(members, shared))
        else:
            singles += members
    return families, singles


def shared_length(requests: Sequence[Request]) -> int:
    """Length of the common prefix of all sequences, before the first scored token."""
    places = zip(*(request.tokens[: -request.num_scored] for request in requests), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, places))


def _batches(lengths: Sequence[int], budget: int) -> list[slice]:
    """Cut descending lengths into slices within the token budget, at the lowest total cost:

    sum over slices of PASS_TOKENS + rows * width,      width = the slice's first length
    """
    cost, start = [0], [0]  # of the best cut of the first i lengths: its cost, and the start of its last slice
    for end in range(1, len(lengths) + 1):
        best: tuple[int, int] | None = None
        for first in range(end - 1, -1, -1):
            size = (end - first) * max(1, lengths[first])
            if size > budget and best is not None:
                break
            total = cost[first] + PASS_TOKENS + size
            if best is None or total < best[0]:
                best = (total, first)
        assert best is not None, "a slice of one row is always allowed"
        cost.append(best[0])
        start.append(best[1])
    cuts, end = [], len(lengths)
    while end > 0:
        cuts.append(slice(start[end], end))
        end = start[end]
    return cuts[::-1]


class _Prefilled(NamedTuple):
    """Families after a pass over their prefixes: logits [B, V] there, the state, and the mask [B, T] of padding."""

    families: list[_Family]
    logits: Tensor
    cache: Any
    mask: Tensor | None


class _Scorer:
    """Requests and the forward passes of a model that score them, with the arguments that the model accepts."""

    def __init__(self, model: Any, requests: Sequence[Request], batch_tokens: int) -> None:
        self.model, self.requests, self.batch_tokens = model, requests, batch_tokens
        self.device = next(model.parameters()).device
        accepted = inspect.signature(model.forward).parameters
        self.keeps = "logits_to_keep" in accepted
        is_ours = getattr(model.config, "model_type", "") == "efla"
        self.takes_positions = "position_ids" in accepted and not is_ours
        self.concats_states = is_ours and why_not_recurrent(model) is None
        self.can_share = "past_key_values" in accepted and "attention_mask" in accepted
        self.max_rows_of_logits = max(1, MAX_LOGITS // int(model.config.get_text_config().vocab_size))

    def _run(
        self, tokens: Tensor, *, keep: int | None = None, cache: Any = None, mask: Tensor | None = None, **options: Any
    ) -> Any:
        """The model's output for tokens [B, T] after a state. mask [B, past + T]: zero at padding.

        keep: number of last tokens whose logits are needed; a model may return more.
        """
        if keep is not None and self.keeps:
            options["logits_to_keep"] = keep
        if cache is not None:
            options["past_key_values"] = cache
        if mask is not None:
            options["attention_mask"] = mask
            if self.takes_positions:
                options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return self.model(input_ids=tokens, **options)

    def singles(self, singles: list[int]) -> Iterator[Scores]:
        """Whole sequences, padded on the right."""
        lengths = {i: len(self.requests[i].tokens) - 1 for i in singles}
        order = sorted(singles, key=lambda i: -lengths[i])
        for chosen in _batches([lengths[i] for i in order], self.batch_tokens):
            whole = order[chosen]
            length = lengths[whole[0]]
            # Keep logits from the first scored position of any row on; many rows of a large vocabulary take several passes.
            keep = max(length - lengths[i] + self.requests[i].num_scored for i in whole)
            rows = max(1, self.max_rows_of_logits // keep)
            for at in range(0, len(whole), rows):
                batch = whole[at : at + rows]
                tokens = padded([self.requests[i].tokens[:-1] for i in batch], self.device, length)
                logits = self._run(tokens, keep=keep, use_cache=False).logits[:, -keep:]
                yield [self._scored(i, logits[row, : keep - length + lengths[i]]) for row, i in enumerate(batch)]

    def families(self, families: list[_Family]) -> Iterator[Scores]:
        """Passes over the prefixes of families, then over their continuations.

        States of constant size are collected first, so that continuations of similar length run together.
        """
        order = sorted(families, key=lambda family: -family.shared)
        waiting: list[_Prefilled] = []
        for chosen in _batches([family.shared for family in order], self.batch_tokens):
            waiting.append(self._prefill(order[chosen]))
            if not self.concats_states or sum(cached_state_bytes(p.cache) for p in waiting) >= WAITING_BYTES:
                yield from self._continuations(waiting)
                waiting = []
        if waiting:
            yield from self._continuations(waiting)

    def _prefill(self, families: list[_Family]) -> _Prefilled:
        length = families[0].shared
        prefixes = [self.requests[family.members[0]].tokens[: family.shared] for family in families]
        lengths = torch.tensor([family.shared for family in families], device=self.device)
        is_padded = bool((lengths < length).any())
        mask = (torch.arange(length, device=self.device) >= length - lengths[:, None]).long() if is_padded else None
        out = self._run(padded(prefixes, self.device, length, left=True), keep=1, mask=mask, use_cache=True)
        return _Prefilled(families, out.logits[:, -1], out.past_key_values, mask)

    def _continuations(self, waiting: list[_Prefilled]) -> Iterator[Scores]:
        """The continuations of one prefill, or of several whose states can be concatenated."""
        first = torch.cat([prefilled.logits for prefilled in waiting])
        caches = [prefilled.cache for prefilled in waiting]
        cache = caches[0] if len(caches) == 1 else state.merge(caches)
        mask = None if self.concats_states else waiting[0].mask
        found = []
        rests = []  # (row of first and of the cache, index, tokens after the prefix)
        for row, family in enumerate(family for prefilled in waiting for family in prefilled.families):
            for index in family.members:
                rest = list(self.requests[index].tokens[family.shared :])
                if len(rest) == 1:
                    found.append(self._scored(index, first[row : row + 1]))
                else:
                    rests.append((row, index, rest))
        if found:
            yield found
        rests.sort(key=lambda item: -len(item[2]))
        budget = min(self.batch_tokens, self.max_rows_of_logits)
        for part in _batches([len(rest) - 1 for _, _, rest in rests], budget):
            piece = rests[part]
            of_row = torch.tensor([row for row, _, _ in piece], device=self.device)
            inputs = padded([rest[:-1] for _, _, rest in piece], self.device, len(piece[0][2]) - 1)
            joined = None if mask is None else torch.cat([mask[of_row], torch.ones_like(inputs)], dim=1)
            later = self._run(inputs, cache=state.select(cache, of_row), mask=joined, use_cache=True).logits
            yield [
                self._scored(i, torch.cat([first[row : row + 1], later[k, : len(rest) - 1]]))
                for k, (row, i, rest) in enumerate(piece)
            ]

    def _scored(self, index: int, logits: Tensor) -> tuple[int, ContinuationScore]:
        """A request and its score, from logits [T, V] that end with those of its scored tokens."""
        request = self.requests[index]
        target = torch.tensor(request.tokens[-request.num_scored :], device=logits.device)
        logits = logits[-request.num_scored :]
        log_probs = torch.log_softmax(logits.float() if logits.dtype in HALF_DTYPES else logits, dim=-1)
        picked = log_probs.gather(-1, target[:, None])
        return index, ContinuationScore(float(picked.double().sum()), bool((logits.argmax(-1) == target).all()))


def padded(rows: Sequence[Sequence[int]], device: torch.device, length: int, left: bool = False) -> Tensor:
    """Rows of tokens [B, length], padded with token 0."""
    filled = [[*[0] * (length - len(row)), *row] if left else [*row, *[0] * (length - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.long, device=device)
