"""The paper's tasks with our own scorer: no lm-evaluation-harness needed, the same numbers (spec lm.md sections 5 and 7.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from efla.evaluation.likelihood import Score
from efla.evaluation.perplexity import carried_log_likelihoods, rolling_log_likelihoods
from efla.evaluation.prompts import Question, Record, count_words, lambada_pair, question, wikitext_text
from efla.evaluation.scorer import Scorer, score_pairs

Progress = Callable[[int], None]
"""Called with the number of requests that were just finished."""


@dataclass(frozen=True)
class LambadaResult:
    """perplexity = exp(-mean log p(word)), per word; accuracy: every token of the word is the likeliest one.

    ``bits_per_byte`` is over the bytes of " word". ``scores`` are the passages', in order.
    """

    perplexity: float
    accuracy: float
    bits_per_byte: float
    scores: list[Score]


def lambada(scorer: Scorer, records: Sequence[Record], progress: Progress | None = None) -> LambadaResult:
    """LAMBADA: predict the last word of each passage."""
    pairs = [lambada_pair(record) for record in _some(records)]
    scores = score_pairs(scorer, pairs, done=_counting(progress))
    total = math.fsum(score.log_prob for score in scores)
    num_bytes = sum(len(word.encode()) for _, word in pairs)
    return LambadaResult(
        perplexity=_exp(-total / len(scores)),
        accuracy=sum(score.is_greedy for score in scores) / len(scores),
        bits_per_byte=-total / num_bytes / math.log(2),
        scores=scores,
    )


@dataclass(frozen=True)
class ChoiceResult:
    """``acc``: how often the right choice has the largest log-likelihood; ``acc_norm``: the largest per character.

    ``scores[i][j]`` is choice j of question i. A tie goes to the first of the tied choices.
    """

    acc: float
    acc_norm: float
    scores: list[list[Score]]
    questions: list[Question]


def multiple_choice(
    scorer: Scorer, task: str, records: Sequence[Record], progress: Progress | None = None
) -> ChoiceResult:
    """One of the eight multiple-choice tasks (a name of ``efla.evaluation.prompts.QUESTIONS``)."""
    questions = [question(task, record) for record in _some(records)]
    pairs = [pair for q in questions for pair in q.pairs]
    groups = [number for number, q in enumerate(questions) for _ in q.pairs]
    flat = iter(score_pairs(scorer, pairs, groups, done=_counting(progress)))
    scores = [[next(flat) for _ in q.pairs] for q in questions]
    right = right_norm = 0
    for q, of_choices in zip(questions, scores, strict=True):
        sums = [score.log_prob for score in of_choices]
        right += sums.index(max(sums)) == q.answer
        per_character = [value / length for value, length in zip(sums, q.lengths, strict=True)]
        right_norm += per_character.index(max(per_character)) == q.answer
    return ChoiceResult(right / len(questions), right_norm / len(questions), scores, questions)


@dataclass(frozen=True)
class PerplexityResult:
    """Of articles: word_perplexity = exp(-sum log p / words), byte_perplexity and bits_per_byte over bytes.

    Words and bytes are those of the original articles, as the harness counts them. ``log_probs`` are the articles'.
    """

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    log_probs: list[float]
    words: list[int]


def wikitext(
    scorer: Scorer, records: Sequence[Record], *, carried: bool = False, progress: Progress | None = None
) -> PerplexityResult:
    """WikiText's articles in windows of the model's length, or with the state carried through each article.

    carried: the state goes on from window to window, so that every token sees all of its article. Recurrent models only.
    """
    pages = [str(record["page"]) for record in _some(records)]
    texts = [wikitext_text(page) for page in pages]
    tokens = [scorer.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    measure = carried_log_likelihoods if carried else rolling_log_likelihoods
    found = measure(
        scorer.model,
        tokens,
        prefix_token=scorer.prefix_token,
        max_length=scorer.max_length,
        batch_tokens=scorer.batch_tokens,
        done=_counting(progress),
    )
    words = [count_words(page) for page in pages]
    num_bytes = sum(len(page.encode()) for page in pages)
    total = math.fsum(found)
    return PerplexityResult(
        word_perplexity=_exp(-total / sum(words)),
        byte_perplexity=_exp(-total / num_bytes),
        bits_per_byte=-total / num_bytes / math.log(2),
        log_probs=found,
        words=words,
    )


def _exp(value: float) -> float:
    """exp, infinite where it overflows."""
    return math.exp(value) if value < 709 else math.inf


def _some(records: Sequence[Record]) -> Sequence[Record]:
    if not records:
        raise ValueError("there is nothing to score: the list of records is empty")
    return records


def _counting(progress: Progress | None) -> Callable[[Sequence[object]], None] | None:
    return None if progress is None else lambda finished: progress(len(finished))
