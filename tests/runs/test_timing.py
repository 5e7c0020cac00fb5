"""Contenders take turns; what is timed as a training step is one."""

from __future__ import annotations

import math

import pytest
import torch

from efla.runs.provenance import PeakMemory
from efla.runs.timing import samples_in_turn, seconds_per_call, training_step


def test_contenders_take_turns_forwards_and_backwards() -> None:
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    rounds: list[int] = []
    samples = samples_in_turn(calls, 3, alternate=True, done=rounds.append)
    assert "".join(called) == "abc" + "abc" + "cba" + "abc"
    assert rounds == [1, 2, 3]
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_timed_training_step_changes_the_weights_even_where_gradients_are_off() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    with torch.no_grad():
        loss = training_step(model, optimizer, lambda: 4 * model(torch.ones(3)).sum(), clip=math.sqrt(3))()
    assert loss == pytest.approx(4 * float(before.sum()))
    torch.testing.assert_close(model.weight.detach(), before - 1)  # the gradient is 4 everywhere, clipped to norm 3^0.5


def test_the_first_call_is_not_counted_and_threads_are_restored() -> None:
    called = []
    before = torch.get_num_threads()
    assert seconds_per_call(lambda: called.append(torch.get_num_threads()), threads=1) >= 0
    assert called == [1, 1, 1]
    assert torch.get_num_threads() == before


def test_memory_growth_sees_what_is_held_at_the_peak() -> None:
    size = 64 * 2**20

    def growth(num_bytes: int) -> int:
        peak = PeakMemory("cpu")
        block = torch.ones(num_bytes, dtype=torch.uint8)
        del block
        found = peak.growth()
        if found is None:
            pytest.skip("this system does not tell the peak of a process")
        return found

    assert growth(2 * size) == pytest.approx(2 * size, rel=0.1)
    assert growth(size) == pytest.approx(size, rel=0.1)  # free memory of the call before is not counted
