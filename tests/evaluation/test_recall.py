"""The recall probe: what its sequences are, and that it measures what it says."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from efla.evaluation.recall import RecallBatch, finetune_on_recall, make_batch, recall, usable_tokens
from efla.models import EflaForCausalLM
from tests.evaluation.models import UniformLM, byte_config


class LookupLM(nn.Module):
    """Says what came after the last earlier occurrence of the token; forgets all but the last ``memory`` tokens."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        logits = torch.zeros(*input_ids.shape, 256)
        for b, row in enumerate(input_ids.tolist()):
            for t, token in enumerate(row):
                for s in range(t - 1, max(-1, t - 1 - self.memory), -1):
                    if row[s] == token:
                        logits[b, t, row[s + 1]] = 1.0
                        break
        return CausalLMOutputWithPast(logits=logits)


@pytest.mark.parametrize(("num_pairs", "length"), [(1, 4), (4, 16), (5, 63), (16, 100)])
def test_every_pair_is_asked_for_once(num_pairs, length):
    usable = usable_tokens(256, [0])
    batch = make_batch(usable, num_pairs, length, 6, seed=3, prefix=0)
    keys = set(usable[: len(usable) // 2])
    assert batch.tokens.shape == (6, length + 1)
    for row, places, values in zip(batch.tokens.tolist(), batch.positions.tolist(), batch.values.tolist(), strict=True):
        pairs = dict(zip(row[1 : 2 * num_pairs : 2], row[2 : 2 * num_pairs + 1 : 2], strict=True))
        assert len(pairs) == num_pairs and list(pairs.values()) == values
        assert sorted(row[p - 1] for p in places) == sorted(pairs)
        assert all(pairs[row[p - 1]] == row[p] for p in places)
        assert min(places) > 2 * num_pairs
        fillers = [t for i, t in enumerate(row) if i > 2 * num_pairs and i not in places and i + 1 not in places]
        assert not set(fillers) & set(pairs) and set(fillers) <= keys


def test_a_perfect_memory_recalls_all_and_none_is_at_chance():
    batch = make_batch(usable_tokens(256, [0]), 8, 64, 40, seed=0)
    perfect = recall(LookupLM(64), batch)
    assert perfect.accuracy == perfect.among_values == 1.0
    forgetful = recall(LookupLM(20), batch)
    assert forgetful.accuracy < 0.5
    blank = recall(UniformLM(), batch)
    assert blank.accuracy == 0.0  # all tokens tie, the first wins
    assert abs(blank.among_values - 1 / 8) < 4 * blank.among_values_error + 1e-9


def test_errors_are_over_sequences():
    batch, forgetful = make_batch(usable_tokens(256, [0]), 8, 64, 2, seed=1), LookupLM(20)
    one, two = (recall(forgetful, batch.to(torch.device("cpu"), slice(i, i + 1))) for i in (0, 1))
    both = recall(forgetful, batch, batch_tokens=64)
    assert (both.num_sequences, one.num_sequences) == (2, 1)
    assert one.accuracy != two.accuracy and one.among_values != two.among_values
    mean, error = (one.accuracy + two.accuracy) / 2, abs(one.accuracy - two.accuracy) / 2
    assert (both.accuracy, both.accuracy_error) == pytest.approx((mean, error))
    mean, error = (one.among_values + two.among_values) / 2, abs(one.among_values - two.among_values) / 2
    assert (both.among_values, both.among_values_error) == pytest.approx((mean, error))
    assert math.isnan(one.accuracy_error) and math.isnan(one.among_values_error)


def test_impossible_settings_are_named():
    usable = usable_tokens(256, [0])
    with pytest.raises(ValueError, match="usable tokens"):
        make_batch(usable, 200, 4000, 1, seed=0)
    with pytest.raises(ValueError, match="length is 15"):
        make_batch(usable, 4, 15, 1, seed=0)
    many = usable_tokens(32_000, [0, 1, 2])
    assert (len(many), len(set(many)), many[0], many[-1]) == (2048, 2048, 3, 31_999)
    assert usable_tokens(2051, [0, 1, 2]) == list(range(3, 2051))
    assert 15 <= min(b - a for a, b in pairwise(many)) <= max(b - a for a, b in pairwise(many)) <= 16


def test_training_on_recall_leaves_the_model_itself_alone():
    torch.manual_seed(0)
    model = EflaForCausalLM(byte_config()).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    copied = finetune_on_recall(model, usable_tokens(256, [0]), [(2, 16)], steps=3, seed=0, batch_tokens=64)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in copied.named_parameters())
    told: list[int] = []
    once = finetune_on_recall(
        model, usable_tokens(256, [0]), [(2, 16)], steps=1, seed=0, batch_tokens=64, progress=told.append
    )
    assert told == [1]
    moved = max(float((p - before[name]).detach().abs().max()) for name, p in once.named_parameters())
    assert moved == pytest.approx(1e-3, rel=0.05), "AdamW's first step is as long as its rate"
    with pytest.raises(ValueError, match="at least one step"):
        finetune_on_recall(model, usable_tokens(256, [0]), [], steps=3, seed=0)
    with pytest.raises(ValueError, match="at least one step"):
        finetune_on_recall(model, usable_tokens(256, [0]), [(2, 16)], steps=0, seed=0)


def test_training_on_recall_warms_up_decays_and_goes_round_the_settings(monkeypatch):
    seen: list[tuple[float, float, RecallBatch]] = []

    def recorded(model: Any, optimizer: Any, loss: Any, *, clip: float) -> Any:
        seen.append((clip, optimizer.param_groups[0]["lr"], loss.args[1]))
        return optimizer.step

    monkeypatch.setattr("efla.evaluation.recall.training_step", recorded)
    usable, grid = usable_tokens(256, [0]), [(2, 16), (4, 20), (2, 100)]
    finetune_on_recall(UniformLM(), usable, grid, steps=25, seed=7, prefix=0, rate=2e-3, batch_tokens=64)
    assert [(clip, rate) for clip, rate, _ in seen] == [
        (1.0, pytest.approx(2e-3 * min((t + 1) / 2, 1 - t / 25))) for t in range(25)
    ]
    for step, (_, _, batch) in enumerate(seen):
        pairs, length = grid[step % 3]
        expected = make_batch(usable, pairs, length, max(1, 64 // length), 7 + 1_000_003 * (step + 1), prefix=0)
        assert torch.equal(batch.tokens, expected.tokens) and torch.equal(batch.positions, expected.positions)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["efla", "delta"])
def test_a_rule_learns_to_recall(rule):
    """Two layers, four pairs: far above chance (25 %) after some hundred steps."""
    torch.manual_seed(0)
    model = EflaForCausalLM(byte_config(rule=rule, hidden_size=64, num_heads=2)).eval()
    usable = usable_tokens(256, [0])[:32]
    batch = make_batch(usable, 4, 32, 64, seed=0)
    untrained = recall(model, batch)
    copied = finetune_on_recall(model, usable, [(4, 32)], steps=800, seed=0, rate=3e-3, batch_tokens=1024)
    trained = recall(copied, batch)
    assert untrained.among_values < 0.4
    assert trained.among_values > 0.8
