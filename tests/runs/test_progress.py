"""Bars and lines that show how far a job is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from efla.runs.progress import Bars, GridProgress, clock


def _cells(count: int) -> list[str]:
    return [f"arm=exact-flow seed={seed}" for seed in range(count)]


def test_each_finished_cell_is_a_line_with_its_loss_accuracy_and_the_time_left() -> None:
    out = io.StringIO()
    first, second = _cells(2)
    with GridProgress(Console(file=out, width=200), 4, already=1, workers=2) as grid:
        grid.start(first)
        grid.progress(first, 0.5, {"loss": 1.25})
        grid.finish(first, "loss 0.5  accuracy 0.875")
        grid.start(second)
        grid.fail(second, "Traceback\nValueError: [bold]this went wrong")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("2/4  arm=exact-flow seed=0  loss 0.5  accuracy 0.875")
    assert "left" in lines[0]
    assert lines[1] == "3/4  arm=exact-flow seed=1  FAILED: ValueError: [bold]this went wrong"


def test_a_terminal_shows_a_bar_per_running_cell() -> None:
    out = io.StringIO()
    (cell,) = _cells(1)
    with GridProgress(Console(file=out, width=120, force_terminal=True), 1) as grid:
        grid.start(cell)
        grid.progress(cell, 0.5, {"loss": 1.25, "accuracy": 0.5})
        grid._progress.refresh()
        counter = grid.start("model/[task]")
        counter.begin(40)
        counter.advance(10)
        grid._progress.refresh()
    assert "all cells" in out.getvalue()
    assert "loss 1.25  accuracy 0.5" in out.getvalue()
    assert "model/[task]" in out.getvalue()
    assert "10/40" in out.getvalue()


def test_the_time_left_is_the_work_left_at_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("efla.runs.progress.time.monotonic", lambda: now[0])
    first, second, third = _cells(3)
    with GridProgress(Console(quiet=True), 7, already=1, workers=2) as grid:
        assert grid.seconds_left() is None
        grid.start(first)
        grid.start(second)
        now[0] += 10
        grid.finish(first, "")
        grid.progress(second, 0.5)
        # One cell took 10 s, the other will take 20 s: 15 s a cell, 4.5 cells to go, two at a time.
        assert grid.seconds_left() == pytest.approx(15 * 4.5 / 2)
        grid.start(third)
        assert grid.seconds_left() == pytest.approx(15 * 4.5 / 2)


def test_cells_count_by_what_they_were_expected_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("efla.runs.progress.time.monotonic", lambda: now[0])
    short, long = _cells(2)
    with GridProgress(Console(quiet=True), 2, expected={short: 5.0, long: 100.0}) as grid:
        grid.start(short)
        now[0] += 10
        grid.finish(short, "")
        assert grid.seconds_left() == pytest.approx(200)  # twice as slow as expected, and so will the other be
        grid.start(long)
        now[0] += 20
        grid.progress(long, 0.1)
        assert grid.seconds_left() == pytest.approx(90 * 2)


def test_work_that_is_counted_or_was_done_earlier_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("efla.runs.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with GridProgress(Console(file=out, width=20), 2) as grid:
        grid.skip("a/[b]", "acc 0.5")
        counter = grid.start("c")
        counter.begin(40)
        counter.advance(4)
        counter.advance(6)
        now[0] += 5
        assert grid.seconds_left() == pytest.approx(15)
        grid.finish("c", "x")
    assert out.getvalue().splitlines() == ["1/2  a/[b]  acc 0.5  from an earlier run", "2/2  c  x  5.0s"]


def test_without_a_terminal_lines_come_now_and_then_and_without_a_console_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("efla.runs.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Bars(Console(file=out, width=20)) as bars, Bars(None) as silent:
        for second in range(25):
            now[0] = second
            bars.update("step", second, 25)
            bars.line_now_and_then(f"second {second} of a long line")
            silent.line("nothing")
    assert out.getvalue().splitlines() == ["second 10 of a long line", "second 20 of a long line"]


def test_durations_are_short() -> None:
    assert [clock(4.21), clock(59.6), clock(187), clock(7500)] == ["4.2s", "1min 00s", "3min 07s", "2h 05min"]
