"""A model as lm-evaluation-harness sees it: its own class for transformers models, with shared prefills and resumption.

Only imported with the extra ``eval`` installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM

from efla.evaluation.likelihood import Request, Score, score, shared_length
from efla.evaluation.perplexity import rolling_windows
from efla.evaluation.progress import Progress
from efla.evaluation.responses import ResponseLog
from efla.models.tokenizer import ByteTokenizer

_AGREEMENT = 1e-3
"""Nats by which the two ways may differ on the first question before a foreign model is scored the plain way."""


class HarnessModel(HFLM):  # type: ignore[misc]
    """``HFLM`` around a model and tokenizer that are already loaded.

    share: score the choices of a question from one pass over what they share; else HFLM's own plain path.
    log: where answers are kept and taken from. progress: told how many requests there are and as they are answered.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int,
        share: bool = True,
        batch_tokens: int = 4096,
        batch_size: int = 16,
        progress: Progress | None = None,
    ) -> None:
        from efla.evaluation.harness_tasks import quiet

        with quiet():
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                max_length=max_length,
                batch_size=batch_size,
                softmax_dtype="float32" if model.dtype.itemsize < 4 else None,
            )
        self.share = share
        self.batch_tokens = batch_tokens
        self.log: ResponseLog | None = None
        self.progress = progress
        self.is_checked = getattr(model.config, "model_type", "") == "efla"
        self._groups: list[Any] = []
        self._is_rolling = False
        self._hook = _Hook(self)
        self.set_cache_hook(self._hook)  # HFLM's plain path tells it each answer

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        def ask(missing: list[Any]) -> list[Any]:
            # The requests of one item of a task are its choices.
            self._groups = [(request.task_name, request.doc_id) for request in missing]
            return list(super(HarnessModel, self).loglikelihood(missing, disable_tqdm=True))

        return [(float(value), bool(greedy)) for value, greedy in self._resumed("loglikelihood", requests, ask)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        self._is_rolling = True
        try:
            ask = self._roll if self.share else super().loglikelihood_rolling
            return [float(value) for value in self._resumed("loglikelihood_rolling", requests, ask)]
        finally:
            self._is_rolling = False

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        # A text in windows starts after the prefix token; bytes get no second bos, which would be scored as a token.
        if self._is_rolling and isinstance(self.tokenizer, ByteTokenizer):
            add_special_tokens = False
        return list(super().tok_encode(string, add_special_tokens=add_special_tokens, **kwargs))

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside results, without asking the hub."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(self.model.dtype),
        }

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not self.share or self._is_rolling:
            return list(super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs))
        asked = [
            Request((context + continuation)[-(self.max_length + 1) :], len(continuation), group)
            for (_, context, continuation), group in zip(requests, self._groups, strict=True)
        ]
        if not self.is_checked:
            self.is_checked = True
            self.share = sharing_agrees(self.model, asked)
            if not self.share:
                return list(super()._loglikelihood_tokens(requests, disable_tqdm=True))

        def done(finished: list[tuple[int, Score]]) -> None:
            self.tell([("loglikelihood", requests[i][0], [value.log_prob, value.is_greedy]) for i, value in finished])

        found = score(self.model, asked, batch_tokens=self.batch_tokens, done=done)
        return [(value.log_prob, value.is_greedy) for value in found]

    def _roll(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Texts in windows, all windows of all texts batched by length; a text is kept when its last window is done."""
        windows: list[tuple[int, Request]] = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            windows += [(i, window) for window in rolling_windows(tokens, self.prefix_token_id, self.max_length)]
        parts: list[dict[int, float]] = [{} for _ in requests]
        left = [0] * len(requests)
        for i, _ in windows:
            left[i] += 1

        def total(i: int) -> float:
            return sum(parts[i][k] for k in sorted(parts[i]))

        def done(finished: list[tuple[int, Score]]) -> None:
            complete = []
            for k, value in finished:
                i = windows[k][0]
                parts[i][k] = value.log_prob
                left[i] -= 1
                if left[i] == 0:
                    complete.append(("loglikelihood_rolling", requests[i].args, total(i)))
            if complete:
                self.tell(complete)

        score(self.model, [window for _, window in windows], batch_tokens=self.batch_tokens, done=done)
        return [total(i) for i in range(len(requests))]

    def _resumed(self, kind: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Answers from the log where it has them, the others asked."""
        known = [None if self.log is None else self.log.get(kind, request.args) for request in requests]
        missing = [request for request, answer in zip(requests, known, strict=True) if answer is None]
        if self.progress is not None:
            self.progress.begin(len(requests))
            self.progress.advance(len(requests) - len(missing))
        asked = iter(ask(missing) if missing else [])
        self._hook.flush()
        return [next(asked) if answer is None else answer for answer in known]

    def tell(self, answers: Sequence[tuple[str, Sequence[Any], Any]]) -> None:
        """Note answers as they come."""
        if self.log is not None:
            self.log.add(answers)
        if self.progress is not None:
            self.progress.advance(len(answers))


class _Hook:
    """What the harness calls with each answer of its plain path; kept some dozens at a time."""

    def __init__(self, model: HarnessModel) -> None:
        self.model = model
        self.flush_at = 64
        self.waiting: list[tuple[str, Sequence[Any], Any]] = []

    def add_partial(self, kind: str, arguments: Sequence[Any], answer: Any) -> None:
        self.waiting.append((kind, arguments, answer))
        if len(self.waiting) >= self.flush_at:
            self.flush()

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.model.tell(waiting)


def sharing_agrees(model: Any, requests: Sequence[Request]) -> bool:
    """Whether a shared prefill gives the plain scores, tried on the first questions that have one.

    Some architectures cannot continue several sequences from a padded prefill; those are scored the plain way.
    """
    groups: dict[Any, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    tried = [group for group in groups.values() if len(group) > 1 and shared_length(group) >= 8][:3]
    sample = [request for group in tried for request in group]
    try:
        shared = score(model, sample)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        plain = score(model, sample, share=False)
        gap = max((abs(a.log_prob - b.log_prob) for a, b in zip(shared, plain, strict=True)), default=0.0)
        if gap <= _AGREEMENT * max(1.0, _spread(model)):
            return True
        reason = f"scores differ by {gap:.2g} nats"
    warnings.warn(
        f"{type(model).__name__} cannot continue from a shared prefill ({reason}); its choices are scored one by one",
        stacklevel=2,
    )
    return False


def _spread(model: Any) -> float:
    """How much coarser than float32 the model's numbers are, in a log-likelihood of some tens of nats."""
    return 1.0 if model.dtype.itemsize >= 4 else 1000.0
