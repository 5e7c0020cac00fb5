"""The prompts of the paper's tasks (spec lm.md section 5), written out here without lm-evaluation-harness.

A record is a dictionary in the format of the task's data set on the Hugging Face hub (:mod:`efla.evaluation.local_data`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """Choice i is ``continuations[i]`` after ``contexts[i]``; ``answer`` is the right one.

    ``lengths``: each choice's characters, by which acc_norm divides its score (the space before it is not counted).
    """

    contexts: list[str]
    continuations: list[str]
    answer: int
    lengths: list[int]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(zip(self.contexts, self.continuations, strict=True))


def question(task: str, record: Record) -> Question:
    """The question that a multiple-choice task makes of a record."""
    return QUESTIONS[task](record)


def lambada_pair(record: Record) -> tuple[str, str]:
    """The text without its last space-separated word, and a space and that word."""
    *context, word = record["text"].split(" ")
    return " ".join(context), " " + word


def _choices(context: str, choices: list[str], answer: int) -> Question:
    return Question([context] * len(choices), [f" {c}" for c in choices], answer, [len(c) for c in choices])


def _piqa(record: Record) -> Question:
    return _choices(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], int(record["label"]))


def _hellaswag(record: Record) -> Question:
    context = record["ctx_a"] + " " + record["ctx_b"].capitalize()
    prompt = without_tags(record["activity_label"] + ": " + context)
    return _choices(prompt, [without_tags(ending) for ending in record["endings"]], int(record["label"]))


def without_tags(text: str) -> str:
    """HellaSwag's text without WikiHow's tags: " [title]" is ". ", other brackets go, two spaces become one."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _winogrande(record: Record) -> Question:
    sentence = record["sentence"]
    before, after = sentence.split("_", 1)
    contexts = [before + record["option1"], before + record["option2"]]
    return Question(contexts, [" " + after.strip()] * 2, int(record["answer"]) - 1, [len(c) for c in contexts])


def _arc(record: Record) -> Question:
    choices = record["choices"]
    answer = choices["label"].index(record["answerKey"])
    return _choices(f"Question: {record['question']}\nAnswer:", choices["text"], answer)


def _boolq(record: Record) -> Question:
    prompt = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    return _choices(prompt, ["no", "yes"], int(record["label"]))


def _openbookqa(record: Record) -> Question:
    choices = record["choices"]
    return _choices(record["question_stem"], choices["text"], choices["label"].index(record["answerKey"].lstrip()))


def _sciq(record: Record) -> Question:
    prompt = f"{record['support'].lstrip()}\nQuestion: {record['question']}\nAnswer:"
    wrong = [record["distractor1"], record["distractor2"], record["distractor3"]]
    return _choices(prompt, [*wrong, record["correct_answer"]], 3)


QUESTIONS: dict[str, Callable[[Record], Question]] = {
    "piqa": _piqa,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "boolq": _boolq,
    "openbookqa": _openbookqa,
    "sciq": _sciq,
}

# What WikiText's tokenisation did to the text, undone in this order (spec lm.md section 5).
_DETOKENISE: list[tuple[str, str]] = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
]
_BRACKETS = [
    (re.compile(rf"{opening}\s*([^{closing}]*?)\s*{closing}"), rf"{left}\1{right}")
    for opening, closing, left, right in (
        (r"\(", r"\)", "(", ")"),
        (r"\[", r"\]", "[", "]"),
        ("{", "}", "{", "}"),
        ('"', '"', '"', '"'),
        ("'", "'", "'", "'"),
    )
]
_MISCELLANEOUS = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def wikitext_text(page: str) -> str:
    """A WikiText article as running text."""
    for old, new in _DETOKENISE:
        page = page.replace(old, new)
    for pattern, replacement in _BRACKETS:
        page = pattern.sub(replacement, page)
    for old, new in _MISCELLANEOUS:
        page = page.replace(old, new)
    return page


def count_words(page: str) -> int:
    """Whitespace-separated pieces of the original article, counted as the harness counts them: the empty pieces before
    a leading and after a trailing space are pieces too."""
    return len(re.split(r"\s+", page))
