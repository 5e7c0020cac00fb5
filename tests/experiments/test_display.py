"""What a run shows while it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from efla.experiments.display import Display
from efla.experiments.experiment import Cell, Event


def _cells(count: int) -> list[Cell]:
    return [Cell({"arm": "exact-flow", "seed": seed}) for seed in range(count)]


def test_each_finished_cell_is_a_line_with_its_loss_accuracy_and_the_time_left() -> None:
    out = io.StringIO()
    first, second = _cells(2)
    with Display(4, 1, 2, Console(file=out, width=200)) as display:
        display.show(Event("started", first))
        display.show(Event("progress", first, 0.5, {"loss": 1.25}))
        display.show(Event("finished", first, rows=[{"show": {"loss": 0.5, "accuracy": 0.875}}]))
        display.show(Event("started", second))
        display.show(Event("failed", second, message="Traceback\nValueError: [bold]this went wrong"))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("2/4  arm=exact-flow seed=0  loss 0.5  accuracy 0.875")
    assert "left" in lines[0]
    assert lines[1] == "3/4  arm=exact-flow seed=1  FAILED: ValueError: [bold]this went wrong"


def test_a_terminal_shows_a_bar_per_running_cell() -> None:
    out = io.StringIO()
    (cell,) = _cells(1)
    with Display(1, 0, 1, Console(file=out, width=120, force_terminal=True)) as display:
        display.show(Event("started", cell))
        display.show(Event("progress", cell, 0.5, {"loss": 1.25, "accuracy": 0.5}))
        display._progress.refresh()
    assert "all cells" in out.getvalue()
    assert "loss 1.25  accuracy 0.5" in out.getvalue()


def test_the_time_left_is_the_work_left_at_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("efla.experiments.display.time.monotonic", lambda: now[0])
    first, second, third = _cells(3)
    with Display(7, 1, 2, Console(quiet=True)) as display:
        assert display.seconds_left() is None
        display.show(Event("started", first))
        display.show(Event("started", second))
        now[0] += 10
        display.show(Event("finished", first, rows=[{}]))
        display.show(Event("progress", second, 0.5))
        # One cell took 10 s, the other will take 20 s: 15 s a cell, 4.5 cells to go, two at a time.
        assert display.seconds_left() == pytest.approx(15 * 4.5 / 2)
        display.show(Event("started", third))
        assert display.seconds_left() == pytest.approx(15 * 4.5 / 2)


def test_cells_count_by_what_they_were_expected_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("efla.experiments.display.time.monotonic", lambda: now[0])
    short, long = _cells(2)
    with Display(2, 0, 1, Console(quiet=True), {short.id: 5.0, long.id: 100.0}) as display:
        display.show(Event("started", short))
        now[0] += 10
        display.show(Event("finished", short, rows=[{}]))
        assert display.seconds_left() == pytest.approx(200)  # twice as slow as expected, and so will the other be
        display.show(Event("started", long))
        now[0] += 20
        display.show(Event("progress", long, 0.1))
        assert display.seconds_left() == pytest.approx(90 * 2)
