"""Our scorers: against scoring every sequence alone in float64, and against closed forms."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch

from efla.evaluation import (
    ByteTokenizer,
    Request,
    Scorer,
    bits_by_position,
    carried_log_likelihoods,
    doubling_buckets,
    even_buckets,
    lambada,
    likelihood,
    multiple_choice,
    rolling_log_likelihoods,
    score,
    score_pairs,
    stream_bits,
    tasks,
    wikitext,
)
from efla.evaluation.likelihood import PASS_TOKENS, _batches, shared_length
from efla.evaluation.perplexity import rolling_windows, why_not_carried
from efla.evaluation.scorer import encode_pair
from tests.evaluation.models import FAMILIES, TEXT, UniformLM, llama, trained

MODELS = [*FAMILIES, "llama"]


def model_of(name: str) -> torch.nn.Module:
    return llama() if name == "llama" else trained(name)


def random_requests(seed: int = 0) -> list[Request]:
    """Questions of 1 to 4 choices with contexts and continuations of every awkward length, some differing in the context."""
    draw = random.Random(seed)
    text = list(TEXT.encode())

    def piece(length: int) -> list[int]:
        start = draw.randrange(len(text) - length)
        return text[start : start + length]

    requests = []
    for group, context in enumerate((1, 2, 7, 8, 9, 20, 33, 63, 64, 65, 100)):
        shared = [0, *piece(context)]
        for _ in range(draw.choice((1, 2, 3, 4))):
            own = piece(draw.choice((0, 0, 5)))  # as in WinoGrande: the context differs too
            scored = piece(draw.choice((1, 2, 17, 40)))
            requests.append(Request([*shared, *own, *scored], len(scored), group))
    return requests


def alone(model: torch.nn.Module, request: Request) -> tuple[float, bool]:
    """The definition: one forward pass over one sequence, in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([list(request.tokens[:-1])]), use_cache=False).logits[0]
    target = torch.tensor(list(request.tokens[-request.num_scored :]))
    picked = torch.log_softmax(logits[-request.num_scored :], -1).gather(-1, target[:, None])
    return float(picked.sum()), bool((logits[-request.num_scored :].argmax(-1) == target).all())


@pytest.mark.parametrize("share", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_one_sequence_at_a_time(name, share):
    model = model_of(name)
    requests = random_requests()
    try:
        expected = [alone(model, request) for request in requests]
        in_double = score(model, requests, share=share, batch_tokens=300)
        model.float()
        in_single = score(model, requests, share=share, batch_tokens=300)
    finally:
        model.float()
    for (log_prob, is_greedy), double, single in zip(expected, in_double, in_single, strict=True):
        assert double.log_prob == pytest.approx(log_prob, abs=1e-10)
        assert double.is_greedy == is_greedy
        assert single.log_prob == pytest.approx(log_prob, abs=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 50, 100_000])
def test_scores_do_not_depend_on_the_batch(batch_tokens):
    requests = random_requests(seed=3)
    expected = score(trained("efla"), requests, share=False, batch_tokens=1)
    found = score(trained("efla"), requests, batch_tokens=batch_tokens)
    assert [s.log_prob for s in found] == pytest.approx([s.log_prob for s in expected], abs=1e-4)


def test_batches_are_the_cheapest_cut_within_the_budget():
    """Against all cuts of ten lengths, and in order without a gap."""
    draw = random.Random(0)
    for budget in (1, 200, 500, 4096):
        lengths = sorted((draw.randrange(0, 300) for _ in range(10)), reverse=True)
        lengths = [*lengths[:5], 2, 1, 1, 0, 0] if budget == 200 else lengths

        def cost(cuts: list[slice], lengths: list[int] = lengths) -> int:
            return sum(PASS_TOKENS + (c.stop - c.start) * max(1, lengths[c.start]) for c in cuts)

        def fits(cut: slice, lengths: list[int] = lengths, budget: int = budget) -> bool:
            rows = cut.stop - cut.start
            return rows == 1 or rows * max(1, lengths[cut.start]) <= budget

        found = _batches(lengths, budget)
        assert [i for cut in found for i in range(cut.start, cut.stop)] == list(range(10))
        assert all(fits(cut) for cut in found)
        every = []
        for borders in itertools.product((False, True), repeat=9):
            ends = [0, *(i + 1 for i, is_border in enumerate(borders) if is_border), 10]
            cuts = [slice(a, b) for a, b in itertools.pairwise(ends)]
            if all(fits(cut) for cut in cuts):
                every.append(cost(cuts))
        assert cost(found) == min(every)
    assert _batches([], 100) == []


def test_continuations_of_several_prefills_run_together_unless_the_states_are_large(monkeypatch):
    """Constant states wait for each other; the passes grow fewer and the scores stay."""
    model = trained("efla")
    text = TEXT.encode()
    requests = [
        Request([0, *text[: 50 + 10 * group], *text[i : i + 12]], 12, group) for group in range(4) for i in range(2)
    ]
    passes: list[tuple[int, ...]] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: passes.append(tuple(args[0].shape)))
    try:
        together = score(model, requests, batch_tokens=100)
        assert passes[-1][0] == 8 and len(passes) == 5, passes  # four prefills, one pass over all eight continuations
        passes.clear()
        monkeypatch.setattr(likelihood, "WAITING_BYTES", 1)
        apart = score(model, requests, batch_tokens=100)
        assert len(passes) == 8, passes
    finally:
        handle.remove()
    assert [s.log_prob for s in together] == pytest.approx([s.log_prob for s in apart], abs=1e-4)


def test_the_shared_pass_reads_the_context_once():
    model = trained("efla")
    read: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    context = [0, *TEXT.encode()[:60]]
    requests = [Request([*context, *TEXT.encode()[i : i + 11]], 11, "q") for i in range(4)]
    try:
        score(model, requests)
        shared, read[:] = sum(read), []
        score(model, requests, share=False)
    finally:
        handle.remove()
    assert shared == len(context) + 4 * 10
    assert sum(read) == 4 * (len(context) + 10)


def test_a_question_of_one_choice_or_with_little_in_common_takes_one_pass():
    model = trained("efla")
    text, shapes = TEXT.encode(), []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        score(model, [Request(list(text[:40]), 5, "alone")])
        assert shapes == [(1, 39)]
        shapes.clear()
        score(model, [Request([*text[:7], *text[i : i + 20]], 5, "short") for i in (30, 41)])  # 7 shared of 8 needed
        assert shapes == [(2, 26)]
        shapes.clear()
        score(model, [Request([*text[:8], *text[i : i + 20]], 5, "long enough") for i in (30, 41)])
        assert shapes == [(1, 8), (2, 19)]
        shapes.clear()
        score(model, [Request([*text[:8], *text[i : i + 20]], 5) for i in (30, 41)])  # of no question
        assert shapes == [(2, 27)]
    finally:
        handle.remove()


def test_a_model_without_a_mask_for_padding_is_scored_without_sharing():
    class Maskless(UniformLM):
        shapes: ClassVar[list[tuple[int, ...]]] = []

        def forward(self, input_ids, past_key_values=None, use_cache=False):
            self.shapes.append(tuple(input_ids.shape))
            return super().forward(input_ids)

    requests = [Request([*range(1, 21), 30 + i], 1, 0) for i in range(2)]
    found = score(Maskless(), requests)
    assert [s.log_prob for s in found] == pytest.approx([-math.log(256)] * 2, rel=1e-6)
    assert Maskless.shapes == [(2, 20)]


@pytest.mark.parametrize("name", ["efla", "llama"])
def test_logits_are_made_only_where_they_are_needed(name):
    """From the first scored position on, and after a prefill at its last token alone."""
    model = model_of(name)
    text, kept = TEXT.encode(), []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: kept.append(args[0].shape[-2]))
    try:
        score(model, [Request(list(text[:40]), 5), Request(list(text[:38]), 7)])
        assert kept == [9]  # the shorter row's 7 end two positions before the longer one's 5
        kept.clear()
        score(model, [Request([*text[:20], *text[i : i + 6]], 4, 0) for i in (30, 41)])
        assert kept == [1, 5]
    finally:
        handle.remove()


def test_many_logits_are_made_in_several_passes(monkeypatch):
    """16 rows of logits at a time, of a vocabulary of 256."""
    model = trained("efla")
    requests = [Request(list(TEXT.encode()[i : i + 30]), 6) for i in range(5)]
    expected = score(model, requests)
    monkeypatch.setattr(likelihood, "MAX_LOGITS", 16 * 256)
    shapes = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        found = score(model, requests)
    finally:
        handle.remove()
    assert shapes == [(2, 29), (2, 29), (1, 29)]
    assert [s.log_prob for s in found] == pytest.approx([s.log_prob for s in expected], abs=1e-4)


def test_the_choices_of_a_question_share_a_pass_over_it():
    model, shapes = trained("efla"), []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        multiple_choice(Scorer(model, ByteTokenizer()), "arc_easy", [asking("arc_easy", CHOICES, 0)])
    finally:
        handle.remove()
    prompt = len("\0Question: Which?\nAnswer:")
    assert shapes == [(1, prompt), (4, len(" ééééé".encode()) - 1)]


def test_finished_requests_are_told_once_each():
    requests = random_requests(seed=5)
    told: list[tuple[int, object]] = []
    found = score(trained("efla"), requests, batch_tokens=200, done=told.extend)
    assert sorted(told) == list(enumerate(found))
    assert score(trained("efla"), []) == []
    with pytest.raises(ValueError, match="batch_tokens must be at least 1, got 0"):
        score(trained("efla"), requests, batch_tokens=0)


def test_a_memory_is_forked_not_shared_between_choices():
    """Scoring a choice must not leave its trace in the state that the next choice starts from."""
    model = trained("gated_efla")
    context = [0, *TEXT.encode()[:40]]
    one = Request([*context, *b"roof. He"], 8, 0)
    other = Request([*context, *b"xyzzy42!"], 8, 0)
    both = score(model, [one, other], batch_tokens=8)  # one continuation at a time
    assert both[0].log_prob == pytest.approx(score(model, [one])[0].log_prob, abs=1e-4)
    assert both[1].log_prob == pytest.approx(score(model, [other])[0].log_prob, abs=1e-4)


def test_shared_length_stops_before_the_first_scored_token():
    assert shared_length([Request([1, 2, 3, 4], 2), Request([1, 2, 3, 5], 1)]) == 2
    assert shared_length([Request([1, 2, 3, 4, 5], 1), Request([1, 2, 9, 4, 5], 1)]) == 2
    with pytest.raises(ValueError, match="at least one token of context"):
        Request([1, 2], 2)


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
def test_acc_takes_the_likeliest_choice_and_acc_norm_the_likeliest_per_character(task, choices, shortest, longest):
    """Of the uniform model: the choice of the fewest bytes, and the one with the fewest bytes per character."""
    scorer = Scorer(UniformLM(), ByteTokenizer(), max_length=256)
    for answer in range(len(choices)):
        found = multiple_choice(scorer, task, [asking(task, choices, answer)])
        assert (found.acc, found.acc_norm) == (float(answer == shortest), float(answer == longest)), choices[answer]


def test_the_uniform_model_gives_the_closed_forms():
    """Spec lm.md 7.5: LAMBADA perplexity exp(mean bytes of " word" ln 256), and so on."""
    scorer = Scorer(UniformLM(), ByteTokenizer(), max_length=256)
    passages = [{"text": "one two three"}, {"text": "a b café"}]
    found = lambada(scorer, passages)
    assert found.perplexity == pytest.approx(math.exp((6 + 6) / 2 * math.log(256)), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(8.0)
    assert found.accuracy == 0.0

    chosen = multiple_choice(scorer, "piqa", [asking("piqa", ["a longer one", "short"], 1)])
    assert chosen.scores[0][0].log_prob == pytest.approx(-13 * math.log(256), rel=1e-6)

    page = " = Title = \n \n Some words , here . \n"
    text = " = Title =\n\nSome words, here.\n"
    perplexity = wikitext(scorer, [{"page": page}])
    words = 10  # the empty pieces before the first space and after the last newline count
    assert perplexity.words == [words]
    assert perplexity.log_probs == [pytest.approx(-len(text) * math.log(256), rel=1e-6)]
    assert perplexity.word_perplexity == pytest.approx(math.exp(len(text) * math.log(256) / words), rel=1e-5)
    assert perplexity.bits_per_byte == pytest.approx(8 * len(text) / len(page), rel=1e-6)

    assert stream_bits(UniformLM(), list(TEXT.encode()), 100).bits_per_token == pytest.approx(8.0)


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


def test_pairs_are_encoded_as_the_harness_does():
    tokenizer = ByteTokenizer()
    assert encode_pair(tokenizer, 0, "ab", " c") == ([0, 97, 98, 32, 99], 2)
    assert encode_pair(tokenizer, 0, "ab  ", "c") == ([0, 97, 98, 32, 32, 99], 3)
    assert encode_pair(tokenizer, 0, "", "c") == ([0, 99], 1)


class NoBos:
    """A tokenizer of bytes that begins texts with nothing; 7 ends them."""

    bos_token_id = None
    eos_token_id: int | None = 7

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def test_a_text_without_context_follows_bos_or_else_eos():
    tokenizer = NoBos()
    scorer = Scorer(trained("efla"), tokenizer)
    assert scorer.prefix_token == 7
    assert encode_pair(tokenizer, 7, "", "ab") == ([7, 97, 98], 2)
    assert encode_pair(tokenizer, 97, "", "ab") == ([97, 98], 1)  # it starts with the token itself: not put twice
    assert encode_pair(tokenizer, 7, "", "") == ([7], 0)
    (found,) = score_pairs(scorer, [("", "ab")])
    assert found.log_prob == pytest.approx(score(scorer.model, [Request([7, 97, 98], 2)])[0].log_prob, abs=1e-5)
    assert Scorer(trained("efla"), ByteTokenizer()).prefix_token == 0
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="neither bos nor eos"):
        _ = scorer.prefix_token
    with pytest.raises(ValueError, match="1 to 2048 tokens, got 0"):
        score_pairs(Scorer(trained("efla"), ByteTokenizer()), [("a", "")])


def test_passes_stay_within_the_batch_of_tokens(monkeypatch):
    """Of every task, through the scorer; and progress is told of each request."""
    model = trained("efla")
    shapes: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(args[0].numel()))
    pages = [{"page": TEXT[i : i + 150]} for i in range(4)]
    choices = [asking("arc_easy", CHOICES, 0)] * 3
    scorer = Scorer(model, ByteTokenizer(), max_length=30, batch_tokens=60)
    told: list[int] = []
    try:
        for work, count in (
            (lambda: wikitext(scorer, pages, progress=told.append), 4 * 5),
            (lambda: wikitext(scorer, pages, carried=True, progress=told.append), 4),
            (lambda: multiple_choice(scorer, "arc_easy", choices, told.append), 12),
            (lambda: lambada(scorer, [{"text": "one two three"}] * 5, told.append), 5),
        ):
            work()
            assert max(shapes) <= 60 and len(shapes) > 1
            assert sum(told) == count
            shapes.clear(), told.clear()
    finally:
        handle.remove()
    for empty in (
        lambda: wikitext(scorer, []),
        lambda: lambada(scorer, []),
        lambda: multiple_choice(scorer, "piqa", []),
    ):
        with pytest.raises(ValueError, match="the list of records is empty"):
            empty()


def test_hopeless_perplexities_are_infinite_not_an_error():
    class Sure(UniformLM):
        """Expects token 1, come what may."""

        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits[..., 1] = 1000.0
            return out

    # The largest exponent of a double is between 709 and 710.
    assert (tasks._exp(708.0), tasks._exp(709.9)) == (math.exp(708.0), math.inf)
    scorer = Scorer(Sure(), ByteTokenizer())
    assert lambada(scorer, [{"text": "one two"}]).perplexity == math.inf
    found = wikitext(scorer, [{"page": "one two"}])
    assert found.word_perplexity == found.byte_perplexity == math.inf
    assert found.bits_per_byte == pytest.approx(1000 / math.log(2), rel=1e-3)


def test_long_contexts_are_cut_on_the_left():
    scorer = Scorer(trained("efla"), ByteTokenizer(), max_length=20)
    long = score_pairs(scorer, [("x" * 50 + "A man is sitting", " on")])
    short = score(scorer.model, [Request(list(b"xxA man is sitting on"), 3)])
    assert long[0].log_prob == pytest.approx(short[0].log_prob, abs=1e-5)
    with pytest.raises(ValueError, match="1 to 20 tokens"):
        score_pairs(scorer, [("a", "b" * 21)])


def test_rolling_windows_score_every_token_once():
    tokens = list(range(100, 110))
    windows = list(rolling_windows(tokens, 7, 4))
    assert [(list(w.tokens), w.num_scored) for w in windows] == [
        ([7, 100, 101, 102, 103], 4),
        ([103, 104, 105, 106, 107], 4),
        ([105, 106, 107, 108, 109], 2),
    ]
    assert list(rolling_windows([], 7, 4)) == []
    assert [len(window.tokens) for window in rolling_windows(tokens, 7, 1)] == [2] * 10
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        list(rolling_windows(tokens, 7, 0))


@pytest.mark.parametrize("name", ["efla", "gated_delta", "mamba2"])
def test_a_carried_state_sees_the_whole_text(name):
    model = trained(name)
    texts = [list(TEXT.encode()[: 40 + 37 * i]) for i in range(4)]
    whole = [score(model, [Request([0, *text], len(text))])[0].log_prob for text in texts]
    for length in (16, 33, 1000):
        found = carried_log_likelihoods(model, texts, prefix_token=0, max_length=length, batch_tokens=2 * length)
        assert found == pytest.approx(whole, abs=2e-4)
    rolling = rolling_log_likelihoods(model, texts, prefix_token=0, max_length=16)
    assert max(abs(a - b) for a, b in zip(rolling, whole, strict=True)) > 0.1  # windows forget, as they must


def test_a_softmax_model_cannot_carry_its_state():
    for model in (trained("softmax"), trained("hybrid"), llama()):
        with pytest.raises(ValueError, match="cannot be carried"):
            carried_log_likelihoods(model, [[1, 2, 3]], prefix_token=0, max_length=8)


def test_a_foreign_recurrent_model_is_tried_before_its_state_is_trusted(monkeypatch):
    model = copy.deepcopy(trained("efla"))
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert why_not_carried(model) is None
    assert not calls, "of our own it is known"
    model.config.model_type = "foreign"
    assert why_not_carried(model) is None
    assert calls
    handle.remove()
    forward = model.forward

    def forgets(input_ids, past_key_values=None, **options):
        return forward(input_ids=input_ids, **options)

    def refuses(input_ids, past_key_values=None, **options):
        if past_key_values is not None:
            raise RuntimeError("no state, please")
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", forgets)
    assert re.fullmatch(r"transformers' 'foreign' forgets between windows \(by \S+ nats\)", why_not_carried(model))
    monkeypatch.setattr(model, "forward", refuses)
    assert why_not_carried(model) == (
        "transformers' 'foreign' does not continue from a state (RuntimeError: no state, please)"
    )


def test_curves_have_an_error_over_rows_and_stop_after_the_last_bucket():
    model, told = trained("efla"), []
    rows = [list(TEXT.encode()[i : i + 131]) for i in (0, 50, 100)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of one row there is no error, and no warning about it
        each = [bits_by_position(model, [row], [(3, 20)]) for row in rows]
    assert math.isnan(each[0].standard_errors[0])
    curve = bits_by_position(model, rows, [(3, 20)], window=16, batch_rows=2, progress=told.append)
    values = [one.bits[0] for one in each]
    assert curve.bits == pytest.approx([sum(values) / 3], abs=1e-5)
    assert curve.standard_errors == pytest.approx([float(np.std(values, ddof=1)) / math.sqrt(3)], rel=1e-3)
    assert (curve.starts, curve.ends) == ([3], [20])
    assert told == [32, 32, 16, 16], "two windows of 16 for two rows, then for one"


@pytest.mark.parametrize("name", ["efla", "softmax"])
def test_bits_by_position_are_the_mean_of_the_tokens_there(name):
    model = trained(name)
    rows = [list(TEXT.encode()[i : i + 131]) for i in (0, 50, 100)]
    buckets = [(1, 1), (2, 64), (65, 130)]
    curve = bits_by_position(model, rows, buckets, window=48, batch_rows=2)
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor(rows)[:, :-1]).logits, -1)
    picked = log_probs.gather(-1, torch.tensor(rows)[:, 1:, None])[..., 0]
    for j, (first, last) in enumerate(buckets):
        expected = -float(picked[:, first - 1 : last].mean()) / math.log(2)
        assert curve.bits[j] == pytest.approx(expected, abs=1e-4)
    assert curve.num_rows == 3
    with pytest.raises(ValueError, match="equally long"):
        bits_by_position(model, rows, [(1, 131)])


def test_buckets_cover_every_position_once():
    for buckets in (even_buckets(200), doubling_buckets(1000), doubling_buckets(64), doubling_buckets(40)):
        covered = [p for first, last in buckets for p in range(first, last + 1)]
        assert covered == list(range(1, covered[-1] + 1))
    assert doubling_buckets(300) == [(1, 64), (65, 128), (129, 256), (257, 300)]


def test_stream_bits_reset_the_state_for_each_row():
    model = trained("efla")
    tokens = list(TEXT.encode()[:101])
    rows = [tokens[:50], tokens[50:100]]
    total = sum(score(model, [Request(row, len(row) - 1)])[0].log_prob for row in rows)
    found = stream_bits(model, tokens, 50)  # the last row has one token: nothing to score
    assert found.num_scored == 98
    assert found.perplexity == pytest.approx(2**found.bits_per_token)
    for short in ((tokens[:1], 50), (tokens, 1)):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            stream_bits(model, *short)
    assert found.bits_per_token == pytest.approx(-total / 98 / math.log(2), rel=1e-5)
