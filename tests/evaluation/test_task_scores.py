"""Metrics of the paper's tasks through lm-evaluation-harness: closed forms, ties, cuts, and what each pass reads."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from efla.evaluation import ByteTokenizer, Request, score, tasks
from efla.evaluation.items import metric_items
from tests.evaluation.models import TEXT, UniformLM, trained

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from efla.evaluation.harness import HarnessModel, run_task, wikitext_items


@pytest.fixture
def load_records(monkeypatch):
    """Loads a task whose local files hold the given records."""

    def load(name: str, records: list[dict[str, Any]], **options: Any) -> Any:
        monkeypatch.setattr(tasks, "local_records", lambda task, data, limit=None: records[:limit])
        return tasks.load_task(name, Path("data"), **options)

    return load


def uniform(max_length: int = 256) -> HarnessModel:
    return HarnessModel(UniformLM(), ByteTokenizer(), max_length=max_length)


CHOICES = ["abc", "ééééé", "abcdefg", "ab"]
"""With the space before it, "ab" has the fewest bytes; per character "abcdefg" has: 8 / 7 against 4 / 3, 11 / 5 and 3 / 2."""


def asking(task: str, choices: list[str], answer: int) -> dict[str, object]:
    """A record of the task that offers the choices, as its data set has it."""
    labelled = {"choices": {"text": choices, "label": list("ABCD")}, "answerKey": "ABCD"[answer]}
    one, two, *_ = choices
    return {
        "piqa": {"goal": "Which?", "sol1": one, "sol2": two, "label": answer},
        "hellaswag": {"activity_label": "A", "ctx_a": "B", "ctx_b": "c", "endings": choices, "label": str(answer)},
        "winogrande": {"sentence": "See _ run.", "option1": one, "option2": two, "answer": str(answer + 1)},
        "arc_easy": {"question": "Which?", **labelled},
        "arc_challenge": {"question": "Which?", **labelled},
        "boolq": {"passage": "Text.", "question": "is it", "label": answer},
        "openbookqa": {"question_stem": "Which", **labelled},
        "sciq": {
            "support": "Text.",
            "question": "Which?",
            "correct_answer": choices[answer],
            **{f"distractor{i + 1}": wrong for i, wrong in enumerate(choices[:answer] + choices[answer + 1 :])},
        },
    }[task]


@pytest.mark.parametrize(
    ("task", "choices", "shortest", "longest"),
    [
        ("piqa", ["ab", "abcd"], 0, 1),
        ("hellaswag", CHOICES, 3, 2),
        ("winogrande", ["ab", "abcd"], 0, 1),  # the text after the option is scored, which is the same: a tie
        ("arc_easy", CHOICES, 3, 2),
        ("arc_challenge", CHOICES, 3, 2),
        ("boolq", ["no", "yes"], 0, 1),
        ("openbookqa", CHOICES, 3, 2),
        ("sciq", CHOICES, 3, 2),
    ],
)
def test_acc_takes_the_likeliest_choice_and_acc_norm_the_likeliest_per_character(
    task, choices, shortest, longest, load_records
):
    """Of the uniform model: the choice of the fewest bytes, and the one with the fewest bytes per character."""
    answers = range(len(choices))
    loaded = load_records(task, [asking(task, choices, answer) for answer in answers], metrics=("acc_norm",))
    items = run_task(uniform(), task, loaded).items
    assert [(item["acc"], item["acc_norm"]) for item in items] == [
        (float(answer == shortest), float(answer == longest)) for answer in answers
    ]


def test_added_metrics_are_those_that_the_definition_lacks(load_records):
    records = [asking("piqa", ["ab", "abcd"], 0)]
    assert list(run_task(uniform(), "piqa", load_records("piqa", records, metrics=("acc_norm",))).items[0])[-2:] == [
        "acc", "acc_norm",
    ]  # fmt: skip
    boolq = [asking("boolq", ["no", "yes"], 0)]
    assert "acc_norm" not in run_task(uniform(), "boolq", load_records("boolq", boolq)).metrics
    assert "acc_norm" in run_task(uniform(), "boolq", load_records("boolq", boolq, metrics=("acc_norm",))).metrics


def test_the_uniform_model_gives_the_closed_forms(load_records):
    """LAMBADA's perplexity is exp(mean bytes of " word" ln 256), and so on."""
    passages = run_task(
        uniform(), "lambada_openai", load_records("lambada_openai", [{"text": "one two three"}, {"text": "a b café"}])
    )
    expected = math.exp((6 + 6) / 2 * math.log(256))
    assert metric_items(passages.items, "perplexity").exact_metric() == pytest.approx(expected, rel=1e-5)
    assert passages.metrics["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert metric_items(passages.items, "bits_per_byte").exact_metric() == pytest.approx(8.0)
    assert metric_items(passages.items, "acc").exact_metric() == 0.0

    (question,) = run_task(
        uniform(), "piqa", load_records("piqa", [asking("piqa", ["a longer one", "short"], 1)])
    ).items
    assert question["log_probs"][0] == pytest.approx(-13 * math.log(256), rel=1e-6)

    page = " = Title = \n \n Some words , here . \n"
    text = " = Title =\n\nSome words, here.\n"
    words = 10  # the empty pieces before the first space and after the last newline count
    loaded = load_records("wikitext", [{"page": page}])
    for items in (wikitext_items(uniform(), loaded, carried=False), run_task(uniform(), "wikitext", loaded).items):
        (item,) = items
        assert (item["words"], item["bytes"]) == (words, len(page))
        assert item["log_prob"] == pytest.approx(-len(text) * math.log(256), rel=1e-6)
        perplexity = metric_items(items, "word_perplexity").exact_metric()
        assert perplexity == pytest.approx(math.exp(len(text) * math.log(256) / words), rel=1e-5)
        assert metric_items(items, "bits_per_byte").exact_metric() == pytest.approx(8 * len(text) / len(page), rel=1e-6)


def test_hopeless_perplexities_are_infinite_not_an_error(load_records):
    class Sure(UniformLM):
        """Expects token 1, come what may."""

        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits[..., 1] = 1000.0
            return out

    # The largest exponent of a double is between 709 and 710.
    found = [metric_items([{"log_prob": -nats}], "perplexity").exact_metric() for nats in (708.0, 709.9)]
    assert found == [math.exp(708.0), math.inf]
    model = HarnessModel(Sure(), ByteTokenizer(), max_length=256)
    passages = run_task(model, "lambada_openai", load_records("lambada_openai", [{"text": "one two"}]))
    assert passages.metrics["perplexity"] == math.inf
    assert metric_items(passages.items, "perplexity").exact_metric() == math.inf
    pages = wikitext_items(model, load_records("wikitext", [{"page": "one two"}]), carried=False)
    assert metric_items(pages, "word_perplexity").exact_metric() == math.inf
    assert metric_items(pages, "byte_perplexity").exact_metric() == math.inf
    assert metric_items(pages, "bits_per_byte").exact_metric() == pytest.approx(1000 / math.log(2), rel=1e-3)


class Counted:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.total = self.count = 0

    def begin(self, total: int) -> None:
        self.total = total

    def advance(self, count: int) -> None:
        self.count += count


def test_passes_stay_within_the_batch_of_tokens(load_records):
    """Of every kind of task; and progress is told of each request."""
    model, progress = trained("efla"), Counted()
    shapes: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(args[0].numel()))
    harness = HarnessModel(model, ByteTokenizer(), max_length=30, batch_tokens=60, progress=progress)
    pages = [{"page": TEXT[i : i + 150]} for i in range(4)]
    choices = [asking("arc_easy", CHOICES, 0)] * 3
    try:
        for name, records, count in (
            ("wikitext", pages, 4), ("arc_easy", choices, 12), ("lambada_openai", [{"text": "one two three"}] * 5, 5),
        ):  # fmt: skip
            run_task(harness, name, load_records(name, records))
            assert max(shapes) <= 60 and len(shapes) > 1
            assert (progress.count, progress.total) == (count, count)
            shapes.clear()
            progress.count = 0
        for carried in (True, False):
            items = wikitext_items(harness, load_records("wikitext", pages), 3, carried=carried)
            assert len(items) == 3
            assert max(shapes) <= 60 and len(shapes) > 1
            assert (progress.count, progress.total) == (3, 3), "texts are counted, not windows"
            shapes.clear()
            progress.count = 0
    finally:
        handle.remove()


def test_the_choices_of_a_question_share_a_pass_over_it(load_records):
    model, shapes = trained("efla"), []
    loaded = load_records("arc_easy", [asking("arc_easy", CHOICES, 0)])
    harness = HarnessModel(model, ByteTokenizer(), max_length=2048)
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        run_task(harness, "arc_easy", loaded)
    finally:
        handle.remove()
    prompt = len("\0Question: Which?\nAnswer:")
    assert shapes == [(1, prompt), (4, len(" ééééé".encode()) - 1)]


def asked(context: str, continuation: str) -> list[Any]:
    return [SimpleNamespace(args=(context, continuation), task_name="task", doc_id=0)]


def test_long_contexts_are_cut_on_the_left():
    model = trained("efla")
    harness = HarnessModel(model, ByteTokenizer(), max_length=20)
    ((long, _),) = harness.loglikelihood(asked("x" * 50 + "A man is sitting", " on"))
    (short,) = score(model, [Request(list(b"xxA man is sitting on"), 3)])
    assert long == pytest.approx(short.log_prob, abs=1e-5)


def test_a_text_without_context_follows_bos_or_else_eos(load_records):
    model = trained("efla")
    harness = HarnessModel(model, ByteTokenizer(), max_length=256)
    for tokenizer, prefix in ((ByteTokenizer(), 0), (ByteTokenizer(bos_token=None, eos_token="!"), ord("!"))):
        harness.tokenizer = tokenizer
        ((found, _),) = harness.loglikelihood(asked("", "ab"))
        expected = score(model, [Request([prefix, 97, 98], 2)])[0].log_prob
        assert (harness.prefix_token_id, found) == (prefix, pytest.approx(expected, abs=1e-5))
    harness.tokenizer = ByteTokenizer(bos_token=None, eos_token=None)
    with pytest.raises(ValueError, match="neither bos nor eos"):
        wikitext_items(harness, load_records("wikitext", [{"page": "a"}]), carried=True)


def test_bytes_come_back_as_they_were():
    tokenizer = ByteTokenizer()
    text = "It 's a text , with spaces ( and brackets ) . \u00e9"
    assert tokenizer.encode(text) == [0, *text.encode()]
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer(text)["input_ids"] == tokenizer.encode(text, truncation=False) == [0, *text.encode()]
    assert tokenizer(text, "b")["input_ids"] == [0, *text.encode(), 98]
    assert tokenizer.decode([195]) == "\ufffd"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 0, 0, 256)
    assert tokenizer.get_vocab()["a"] == 97 and len(tokenizer.get_vocab()) == 256
