"""Rows on disk survive kills, full disks and damage."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from efla.runs.records import dumps, number
from efla.runs.rows import DAMAGED, ROWS, JsonLog, append_rows, parse, read_rows, repair


def _cell(name: str) -> list[dict[str, object]]:
    return [{"row": "point", "cell": name, "value": 1.5}, {"row": "cell", "cell": name, "rows": 2, "sum": 2}]


def test_appended_rows_are_read_back_unchanged(tmp_path: Path) -> None:
    append_rows(tmp_path, _cell("a"))
    append_rows(tmp_path, _cell("b"))
    assert read_rows(tmp_path) == _cell("a") + _cell("b")


def test_a_file_cut_at_any_byte_keeps_finished_cells_and_sets_the_rest_aside(tmp_path: Path) -> None:
    append_rows(tmp_path, _cell("a"))
    whole_of_a = (tmp_path / ROWS).stat().st_size
    append_rows(tmp_path, _cell("b"))
    data = (tmp_path / ROWS).read_bytes()
    for cut in range(whole_of_a, len(data)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / ROWS).write_bytes(data[:cut])
        repair(folder)
        assert read_rows(folder) == _cell("a")
        assert (folder / ROWS).read_bytes() == data[:whole_of_a]
        left = data[whole_of_a:cut]
        kept = (folder / DAMAGED).read_bytes() if left else b""
        assert kept.rstrip(b"\n") == left.rstrip(b"\n"), "nothing is silently dropped"


def test_a_damaged_line_in_the_middle_loses_its_own_cell_only(tmp_path: Path) -> None:
    for name in "abc":
        append_rows(tmp_path, _cell(name))
    lines = (tmp_path / ROWS).read_bytes().split(b"\n")
    lines[2] = lines[2][:7]  # the first line of b
    (tmp_path / ROWS).write_bytes(b"\n".join(lines))
    assert repair(tmp_path) == 2, "the damaged line, and the one that sums up a cell it was lost from"
    assert read_rows(tmp_path) == _cell("a") + _cell("c")


def test_lines_of_a_cell_without_its_last_line_are_not_rows() -> None:
    data = "".join(dumps(row) + "\n" for row in [_cell("a")[0], *_cell("b")]).encode()
    parsed = parse(data)
    assert parsed.rows == _cell("b")
    assert len(parsed.damaged_lines) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / ROWS).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"disk is full.*finished work is safe"):
        append_rows(tmp_path, _cell("a"))


def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_rows(tmp_path, _cell("a"))
    before = (tmp_path / ROWS).read_bytes()
    real_write = os.write
    calls = []

    def disk_fills_up(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, bytes(data[:10]))

    monkeypatch.setattr(os, "write", disk_fills_up)
    with pytest.raises(OSError, match="disk is full"):
        append_rows(tmp_path, _cell("b"))
    assert len(calls) == 2
    assert (tmp_path / ROWS).read_bytes() == before


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    append_rows(tmp_path, [{"row": "cell", "cell": "a", "values": [math.inf, -math.inf, math.nan, 0.1]}])
    values = [number(value) for value in read_rows(tmp_path)[0]["values"]]
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])
    assert values[3] == 0.1


def test_a_log_keeps_whole_lines_and_takes_any_json(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log.jsonl", encode=json.dumps)
    assert log.read() == []
    log.append([["key", 0.1], ["other", math.inf]])
    with open(log.file, "ab") as file:
        file.write(b'["cut')
    assert [value for _, value in log.read()] == [["key", 0.1], ["other", math.inf], None]
    log.keep(line for line, value in log.read() if value is not None)
    log.append([["key", None]], sync=False)
    assert [value for _, value in log.read()] == [["key", 0.1], ["other", math.inf], ["key", None]]
