"""A model in lm-evaluation-harness: ``HFLM`` with shared prefills, resumption and progress, and running a task on it.

Importing this module needs the extra ``eval``.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from efla.evaluation.likelihood import Request, Scores, families_and_singles, score
from efla.evaluation.perplexity import carried_log_likelihoods, rolling_log_likelihoods
from efla.evaluation.responses import ResponseLog
from efla.evaluation.tasks import silence_lm_eval
from efla.models.accounting import parameter_count
from efla.models.quantization import stored_dtype
from efla.models.tokenizer import ByteTokenizer
from efla.runs.progress import Counter, GridProgress
from efla.runs.records import Record

_AGREEMENT = 1e-3
"""Largest difference in nats between shared and plain scores for which sharing is trusted."""


class HarnessModel(HFLM):  # type: ignore[misc]
    """``HFLM`` around a loaded model and tokenizer.

    share: score the choices of a question from one pass over their common prefix; otherwise use HFLM's own path.
    log: answers are read from it and appended to it. progress: counts requests as they are answered.
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
        progress: Counter | None = None,
    ) -> None:
        with silence_lm_eval():
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
        self.progress = progress or GridProgress(None, 1).start("")
        self.is_checked = getattr(model.config, "model_type", "") == "efla"
        self.flush_at = 64
        self._waiting: list[tuple[str, Sequence[Any], Any]] = []
        self._groups: list[Any] = []
        self._is_rolling = False
        self.set_cache_hook(self)  # HFLM's own path calls add_partial with each answer

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        def ask(missing: list[Any]) -> list[Any]:
            # The requests of one item are its choices.
            self._groups = [(request.task_name, request.doc_id) for request in missing]
            return list(super(HarnessModel, self).loglikelihood(missing, disable_tqdm=True))

        return [(float(value), bool(greedy)) for value, greedy in self._resumed("loglikelihood", requests, ask)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        self._is_rolling = True
        try:
            ask = self._score_windows if self.share else super().loglikelihood_rolling
            return list(map(float, self._resumed("loglikelihood_rolling", requests, ask)))
        finally:
            self._is_rolling = False

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        # Windows start after the prefix token. A byte text gets no second bos, which would be scored as a token.
        if self._is_rolling and isinstance(self.tokenizer, ByteTokenizer):
            add_special_tokens = False
        return list(super().tok_encode(string, add_special_tokens=add_special_tokens, **kwargs))

    def get_model_info(self) -> Record:
        """Facts for the harness's results; HFLM's version asks the hub."""
        return {
            "model_num_parameters": parameter_count(self.model),
            "model_dtype": stored_dtype(self.model),
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

        def done(finished: Scores) -> None:
            self.record([("loglikelihood", requests[i][0], [value.log_prob, value.is_greedy]) for i, value in finished])

        found = score(self.model, asked, batch_tokens=self.batch_tokens, done=done)
        return [(value.log_prob, value.is_greedy) for value in found]

    def _score_windows(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of texts, all their windows batched by length; a text is recorded after its last window."""

        def done(finished: list[tuple[int, float]]) -> None:
            self.record([("loglikelihood_rolling", requests[i].args, value) for i, value in finished])

        texts = [self.tok_encode(request.args[0]) for request in requests]
        return rolling_log_likelihoods(self.model, texts, add=sum, done=done, **self.text_options)  # HFLM uses sum

    @property
    def text_options(self) -> dict[str, Any]:
        """Options of the functions that score whole texts."""
        if self.prefix_token_id is None:
            raise ValueError("the tokenizer has neither bos nor eos; a text without context cannot be scored")
        names = ("max_length", "batch_tokens")
        return {"prefix_token": self.prefix_token_id, **{name: getattr(self, name) for name in names}}

    def _resumed(self, kind: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Answers from the log, and from ``ask`` for requests it does not have."""
        known = [None if self.log is None else self.log.get(kind, request.args) for request in requests]
        missing = [request for request, answer in zip(requests, known, strict=True) if answer is None]
        self.progress.begin(len(requests))
        self.progress.advance(len(requests) - len(missing))
        asked = iter(ask(missing) if missing else [])
        self.record()
        return [next(asked) if answer is None else answer for answer in known]

    def add_partial(self, kind: str, arguments: Sequence[Any], answer: Any) -> None:
        """An answer of HFLM's own path; they are recorded in batches."""
        self._waiting.append((kind, arguments, answer))
        if len(self._waiting) >= self.flush_at:
            self.record()

    def record(self, answers: Sequence[tuple[str, Sequence[Any], Any]] = ()) -> None:
        """Log and count answers, (kind, arguments, answer) each, after those that wait."""
        answers, self._waiting = [*self._waiting, *answers], []
        if answers and self.log is not None:
            self.log.add(answers)
        self.progress.advance(len(answers))


def sharing_agrees(model: Any, requests: Sequence[Request]) -> bool:
    """Whether a shared prefill gives the plain scores on the first questions that have one.

    Some architectures cannot continue several sequences from a padded prefill.
    """
    families, _ = families_and_singles(requests, share=True)
    sample = [requests[i] for family in families[:3] for i in family.members]
    try:
        shared = score(model, sample)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        plain = score(model, sample, share=False)
        gap = max((abs(a.log_prob - b.log_prob) for a, b in zip(shared, plain, strict=True)), default=0.0)
        # Half precision is about 1,000 times coarser than float32 for a log-likelihood of some tens of nats.
        if gap <= _AGREEMENT * (1.0 if model.dtype.itemsize >= 4 else 1000.0):
            return True
        reason = f"scores differ by {gap:.2g} nats"
    warnings.warn(
        f"{type(model).__name__} cannot continue from a shared prefill ({reason}); its choices are scored one by one",
        stacklevel=2,
    )
    return False


class TaskRun(NamedTuple):
    """A task's results as the harness returns them, its log of every sample, and the items and metrics made from them."""

    results: Record
    samples: list[Record]
    items: list[Record]
    metrics: dict[str, float]


def run_task(model: HarnessModel, name: str, task: Any, limit: int | None = None) -> TaskRun:
    """Run one loaded task through lm-evaluation-harness."""
    tasks = {"tasks": {name: task}, "groups": {}}
    aggregations = getattr(task, "_aggregation_list", {})
    aggregations |= {metric: _inf_on_overflow(aggregate) for metric, aggregate in aggregations.items()}
    with silence_lm_eval():
        results = evaluate(model, tasks, limit=limit, bootstrap_iters=0, log_samples=True)
    samples = results.pop("samples")[name]
    numbers = {k.split(",")[0]: v for k, v in results["results"][name].items() if isinstance(v, (int, float))}
    return TaskRun(results, samples, item_records(name, samples), numbers)


def _inf_on_overflow(aggregate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The harness's perplexities raise an error where they overflow."""

    def aggregate_or_inf(items: Any) -> Any:
        try:
            return aggregate(items)
        except OverflowError:
            return math.inf

    return aggregate_or_inf


def item_records(task: str, samples: Sequence[Record]) -> list[Record]:
    """Number, hash, log-likelihoods and metrics of each item, in the order of the data set."""
    found = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        record: Record = {"doc_id": sample["doc_id"], "doc_hash": sample.get("doc_hash", "")[:16]}
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


def wikitext_items(model: HarnessModel, task: Any, limit: int | None = None, *, carried: bool) -> list[Record]:
    """Items of WikiText's articles, scored in windows of the model's length or with the state carried through each.

    Texts, words and bytes are the harness's. With ``carried`` every token sees all of its article; recurrent models only.
    """
    pages = list(task.eval_docs)[:limit]
    texts = [model.tokenizer.encode(task.doc_to_target(page), add_special_tokens=False) for page in pages]
    model.progress.begin(len(pages))
    log_probs = (carried_log_likelihoods if carried else rolling_log_likelihoods)(
        model.model, texts, done=lambda finished: model.progress.advance(len(finished)), **model.text_options
    )
    found = []
    for i, (page, value) in enumerate(zip(pages, log_probs, strict=True)):
        counts = task.process_results(page, [value])
        words, size = counts["word_perplexity"][1], counts["bits_per_byte"][1]
        found.append({"doc_id": i, "log_prob": value, "words": words, "bytes": size})
    return found
