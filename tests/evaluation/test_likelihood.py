"""Scores of requests: against one sequence at a time in float64, and what each pass reads."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, ClassVar

import pytest
import torch

from efla.evaluation import Request, likelihood, score
from efla.evaluation.likelihood import PASS_TOKENS, _batches, shared_length
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


def test_positions_are_counted_from_the_first_token_after_the_padding():
    class Recorded(UniformLM):
        asked: ClassVar[dict[str, Any]] = {}

        def forward(self, input_ids, position_ids=None, attention_mask=None, past_key_values=None, **options):
            self.asked.update(positions=position_ids, mask=attention_mask, cache=past_key_values, **options)

    model = Recorded()
    model.config.model_type = "other"
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    likelihood._Scorer(model, [], 1)._run(torch.ones(2, 4, dtype=torch.long), mask=mask, keep=1, use_cache=True)
    assert Recorded.asked["positions"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert (Recorded.asked["mask"] is mask, Recorded.asked["use_cache"]) == (True, True)
    likelihood._Scorer(model, [], 1)._run(torch.ones(2, 1, dtype=torch.long), mask=mask, cache="state")
    assert (Recorded.asked["positions"].tolist(), Recorded.asked["cache"]) == ([[1], [3]], "state")


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


def test_finished_requests_are_told_once_each():
    requests = random_requests(seed=5)
    told: list[tuple[int, object]] = []
    found = score(trained("efla"), requests, batch_tokens=200, done=told.extend)
    assert sorted(told) == list(enumerate(found))
    assert score(trained("efla"), []) == []
    with pytest.raises(ValueError, match="batch_tokens must be at least 1, got 0"):
        score(trained("efla"), requests, batch_tokens=0)


def test_each_choice_starts_from_a_copy_of_the_state():
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
