"""One optimizer step: the loss it reports, the gradient it takes, and when it takes none."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from efla import EflaForCausalLM, presets
from efla.train.engine import Engine
from efla.train.optimizer import build_optimizer
from efla.train.step import num_labels, row_loss, train_step

BOS = 0


def small_model() -> EflaForCausalLM:
    torch.manual_seed(0)
    return EflaForCausalLM(presets.arm("exact-flow", hidden_size=32, num_heads=2, intermediate_size=32))


def rows_of_documents() -> Tensor:
    """Four rows of 24 tokens; documents start inside the first and the last."""
    rows = torch.randint(1, 256, (4, 24), generator=torch.Generator().manual_seed(3))
    rows[0, 5] = rows[0, 9] = rows[3, 2] = BOS
    return rows


def documents_of(rows: Tensor) -> list[Tensor]:
    """Each document of each row on its own."""
    found = []
    for row in rows:
        starts = [0, *(i for i in range(1, len(row)) if row[i] == BOS), len(row)]
        found += [row[a:b] for a, b in itertools.pairwise(starts)]
    return found


@pytest.mark.parametrize("bos_token", [None, BOS], ids=["carried", "reset"])
def test_the_loss_is_the_mean_over_the_labels_of_each_document_alone(bos_token):
    """Where the memory is reset, the first token of a document is not predicted and not counted."""
    model, rows = small_model().double(), rows_of_documents()
    parts = documents_of(rows) if bos_token is not None else list(rows)
    assert len(parts) == (7 if bos_token is not None else 4)
    with torch.no_grad():
        losses = [
            -model(part[None]).logits[0, :-1].log_softmax(-1).gather(1, part[1:, None]).sum()
            for part in parts
            if len(part) > 1
        ]
    labels = sum(len(part) - 1 for part in parts)
    assert num_labels(rows, bos_token) == labels
    result = train_step(model, build_optimizer(model), [rows[:1], rows[1:]], rate=0.0, bos_token=bos_token)
    assert result.loss == pytest.approx(float(sum(losses)) / labels, rel=1e-9)


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    """Uneven documents, memory reset at their boundaries: the mean is over all labels, however the rows are cut."""
    rows = rows_of_documents()
    weights = []
    for cut in (4, 2, 1):
        model = small_model().double()
        result = train_step(model, build_optimizer(model), rows.split(cut), rate=1e-2, bos_token=BOS)
        weights.append((result, [p.detach().clone() for p in model.parameters()]))
    for result, parameters in weights[1:]:
        assert result.loss == pytest.approx(weights[0][0].loss, rel=1e-12)
        assert result.norm == pytest.approx(weights[0][0].norm, rel=1e-9)
        for a, b in zip(parameters, weights[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("share", [None, 0.5, 2.0], ids=["default", "clipped", "not clipped"])
def test_the_gradient_is_clipped_to_the_norm_given(share):
    """A step of plain gradient descent shows the gradient that was applied: rate x the clipped gradient of this batch."""
    model, rows = small_model().double(), rows_of_documents()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # a gradient norm above the default threshold
    model.eval()
    row_loss(model, rows, num_labels(rows, None)).backward()
    gradient = [p.grad.clone() for p in model.parameters()]  # and left in place: a step must not add to it
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    clip = 1.0 if share is None else share * norm
    assert norm > 2
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=123.0)
    options = {} if share is None else {"clip": clip}
    result = train_step(model, optimizer, [rows], rate=0.25, **options)
    assert (result.applied, result.stop, model.training) == (True, False, True)
    assert result.norm == pytest.approx(norm, rel=1e-9)  # as it was before clipping
    for old, new, g in zip(before, model.parameters(), gradient, strict=True):
        expected = old - 0.25 * g * min(1.0, clip / norm)
        torch.testing.assert_close(new.detach(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_step_that_is_not_finite_changes_nothing(what):
    """Neither weights nor AdamW's averages and step count, and no gradient is left behind for the next step."""
    model, rows = small_model(), rows_of_documents()
    optimizer = build_optimizer(model)
    weight = model.model.norm.weight
    before = [p.detach().clone() for p in model.parameters()]
    if what == "loss":
        with torch.no_grad():
            weight[0] = float("nan")
        result = train_step(model, optimizer, [rows], rate=1e-2)
        assert math.isnan(result.loss)
        with torch.no_grad():
            weight[0] = before[[p is weight for p in model.parameters()].index(True)][0]
    else:
        hook = weight.register_hook(lambda gradient: gradient * float("inf"))
        result = train_step(model, optimizer, [rows], rate=1e-2)
        hook.remove()
        assert math.isfinite(result.loss)
    assert not result.applied
    assert not math.isfinite(result.norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert all(float(state[name].abs().max()) == 0 for state in optimizer.state.values() for name in state)


def test_a_request_to_stop_is_passed_on_after_the_step():
    model = small_model()
    result = train_step(model, build_optimizer(model), [rows_of_documents()], rate=1e-3, stop=lambda: True)
    assert (result.stop, result.applied) == (True, True)
    assert not train_step(model, build_optimizer(model), [rows_of_documents()], rate=0.0, stop=lambda: False).stop


def test_the_precision_is_that_of_the_linear_maps():
    model, seen = small_model(), []
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    mlp = next(module for name, module in model.named_modules() if name.endswith("down_proj"))
    mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for precision, expected in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        seen.clear()
        train_step(model, build_optimizer(model), [rows_of_documents()], rate=0.0, precision=precision)
        assert seen == [expected, torch.float32], precision


class Bigram(nn.Module):
    """The next token depends on this one alone, so that parts of a row have the loss that they have in the row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(9, 9, generator=generator, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2))
        self.calls: list[dict[str, Any]] = []

    def forward(self, input_ids: Tensor, num_items_in_batch: int, **options: Any) -> CausalLMOutputWithPast:
        self.calls.append({"input_ids": input_ids, **options})
        logits = self.weight[input_ids]
        if "shift_labels" in options:
            labels = options["shift_labels"]
        else:
            logits, labels = logits[:, :-1], options["labels"][:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch
        return CausalLMOutputWithPast(loss=loss)


class HalfOfEachRow:
    """The sequence group of one of two ranks."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def part(self, rows: Tensor) -> Tensor:
        return rows.chunk(2, 1)[self.rank]


class Recording(Engine):
    """An engine that keeps what it was asked for."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"device": torch.device("cpu"), **fields})
        object.__setattr__(self, "asked", [])

    def accumulating(self, model: nn.Module, *, is_last: bool) -> Any:
        self.asked.append((model, is_last))
        return super().accumulating(model, is_last=is_last)

    def autocast(self, precision: str) -> Any:
        self.asked.append(precision)
        return nullcontext()


def test_ranks_exchange_gradients_in_the_last_micro_batch_and_average_them():
    """Two ranks with the same rows: twice the labels, and a gradient that their mean makes that of one rank again."""
    rows, model = torch.randint(9, (3, 8), generator=torch.Generator().manual_seed(1)), Bigram()
    alone = train_step(model, torch.optim.SGD(model.parameters()), rows.split(1), rate=0.0)
    engine = Recording(world=2)
    model.unused.grad = torch.ones(2)
    ranked = train_step(model, torch.optim.SGD(model.parameters()), rows.split(1), rate=0.0, engine=engine)
    assert engine.asked == [(model, False), "float32", (model, False), "float32", (model, True), "float32"]
    assert ranked.loss == pytest.approx(alone.loss, rel=1e-12)
    assert ranked.norm == pytest.approx(2 * alone.norm, rel=1e-9)  # summed here, where nothing takes the mean
    assert model.unused.grad is None  # what an earlier batch left behind is not stepped along


@torch.no_grad()
@pytest.mark.parametrize("sequence", [None, HalfOfEachRow(0)], ids=["whole rows", "parts"])
def test_rows_and_labels_move_to_the_engines_device(sequence):
    model = Bigram().to("meta")
    engine = Recording(device=torch.device("meta"), sequence=sequence)
    row_loss(model, torch.ones(3, 8, dtype=torch.long), 21, bos_token=BOS, engine=engine)
    assert engine.asked == ["float32"]
    (call,) = model.calls
    moved = {name: value.device.type for name, value in call.items() if isinstance(value, Tensor)}
    names = ["labels", "cu_seqlens"] if sequence is None else ["shift_labels"]
    assert moved == dict.fromkeys(["input_ids", *names], "meta")


@torch.no_grad()
def test_parts_of_a_row_add_up_to_the_loss_of_the_row():
    """Each rank scores its part of the row and the first token of the next part; logits and cache are not asked for."""
    model, rows = Bigram(), torch.randint(9, (3, 8), generator=torch.Generator().manual_seed(1))
    labels = num_labels(rows, None)
    whole = row_loss(model, rows, labels)
    log_p = model.weight.log_softmax(-1)
    assert float(whole) == pytest.approx(-float(log_p[rows[:, :-1], rows[:, 1:]].mean()), rel=1e-9)
    parts = [
        row_loss(model, rows, labels, engine=Engine(torch.device("cpu"), sequence=HalfOfEachRow(rank)))  # type: ignore[arg-type]
        for rank in range(2)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)
    quiet = {"use_cache": False, "skip_logits": True, "return_dict": True}
    assert all(quiet.items() <= options.items() for options in model.calls)
