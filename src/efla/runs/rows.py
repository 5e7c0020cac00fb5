"""Rows on disk: JSON lines, a cell's lines appended in one write and synced, a half-written tail repaired.

A cell is finished when its last line, the one with ``"row": "cell"``, is complete and finds as many lines before it as
it says. Whatever a kill left behind is
moved to ``rows.damaged.jsonl`` beside the file, never silently dropped, and the cell is run again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from efla.runs.records import Record, dumps

ROWS = "rows.jsonl"
DAMAGED = "rows.damaged.jsonl"


@dataclass(frozen=True)
class Parsed:
    """The rows of finished cells, and the lines that belong to none."""

    rows: list[Record]
    good_lines: list[bytes]
    damaged_lines: list[bytes]


def parse(data: bytes) -> Parsed:
    """Tell the lines of finished cells from what an interrupted write left behind."""
    complete, _, tail = data.rpartition(b"\n")
    rows: list[Record] = []
    good: list[bytes] = []
    damaged: list[bytes] = []
    pending: list[tuple[bytes, Record]] = []
    for line in complete.split(b"\n") if complete else []:
        row = _decode(line)
        if row is None or (pending and pending[-1][1]["cell"] != row["cell"]):
            damaged += [item[0] for item in pending]
            pending = []
        if row is None:
            damaged.append(line)
            continue
        pending.append((line, row))
        if row.get("row") == "cell":
            if row.get("rows", len(pending)) != len(pending):  # a line of this cell was lost: it is not finished
                damaged += [item[0] for item in pending]
                pending = []
                continue
            good += [item[0] for item in pending]
            rows += [item[1] for item in pending]
            pending = []
    damaged += [item[0] for item in pending]
    if tail:
        damaged.append(tail)
    return Parsed(rows, good, [line for line in damaged if line.strip()])


def read_rows(path: Path) -> list[Record]:
    """The rows of all finished cells of a file or of a run folder; an unfinished cell's lines are left out."""
    file = path / ROWS if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"no rows at {file}; expected the output folder of `efla reproduce` or a .jsonl file")
    return parse(file.read_bytes()).rows


def repair(folder: Path) -> int:
    """Move lines of unfinished cells to ``rows.damaged.jsonl`` and rewrite the file atomically; returns their number."""
    file = folder / ROWS
    if not file.exists():
        return 0
    data = file.read_bytes()
    parsed = parse(data)
    if not parsed.damaged_lines and (not data or data.endswith(b"\n")):
        return 0
    with open(folder / DAMAGED, "ab") as damaged:
        damaged.write(b"".join(line + b"\n" for line in parsed.damaged_lines))
        damaged.flush()
        os.fsync(damaged.fileno())
    write_atomically(file, b"".join(line + b"\n" for line in parsed.good_lines))
    return len(parsed.damaged_lines)


def append_rows(folder: Path, rows: Sequence[Record]) -> None:
    """Append one cell's rows in a single write and sync; on a full disk the file is cut back to what it was."""
    assert rows and rows[-1].get("row") == "cell", "a cell's last row marks it as finished"
    data = "".join(dumps(row) + "\n" for row in rows).encode()
    file = folder / ROWS
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, data)
            _sync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise _explain(error, file, str(rows[-1].get("cell"))) from error
    finally:
        os.close(descriptor)


def write_atomically(file: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a kill, sees the old content or the new, nothing in between."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _decode(line: bytes) -> Record | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("cell"), str) else None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a device or a pipe cannot be synced; that is no failure
            raise


def _explain(error: OSError, file: Path, cell: str) -> OSError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "the disk is full" if full else (error.strerror or str(error))
    return OSError(
        error.errno or 0,
        f"cannot write the rows of cell '{cell}' to {file}: {reason}. Finished cells are safe; free some space "
        "and run the same command again, it does the rest",
    )
