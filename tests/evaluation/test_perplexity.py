"""Texts in windows and with the state carried, bits by position and of streams."""

from __future__ import annotations

import copy
import math
import re
import warnings

import numpy as np
import pytest
import torch

from efla.evaluation import (
    Request,
    bits_by_position,
    carried_log_likelihoods,
    doubling_buckets,
    even_buckets,
    rolling_log_likelihoods,
    score,
)
from efla.evaluation.perplexity import rolling_windows, why_not_carried
from tests.evaluation.models import TEXT, UniformLM, llama, trained


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
    with pytest.raises(ValueError, match="equally long"):
        bits_by_position(model, rows, [(1, 131)])


def test_buckets_cover_every_position_once():
    for buckets in (even_buckets(200), doubling_buckets(1000), doubling_buckets(64), doubling_buckets(40)):
        covered = [p for first, last in buckets for p in range(first, last + 1)]
        assert covered == list(range(1, covered[-1] + 1))
    assert doubling_buckets(300) == [(1, 64), (65, 128), (129, 256), (257, 300)]


def test_the_uniform_model_has_eight_bits_per_byte():
    (found,) = rolling_log_likelihoods(UniformLM(), [list(TEXT.encode())], prefix_token=0, max_length=100)
    assert -found / len(TEXT) / math.log(2) == pytest.approx(8.0)


def test_texts_are_reported_once_when_their_last_window_is_scored():
    told = []
    texts = [list(TEXT.encode()[:n]) for n in (100, 5, 60)]
    found = rolling_log_likelihoods(
        trained("efla"), texts, prefix_token=0, max_length=16, batch_tokens=64, done=told.extend
    )
    assert sorted(told) == list(enumerate(found))
