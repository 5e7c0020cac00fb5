"""JSON lines that survive kills and full disks, and the rows of finished cells stored in them.

A cell is finished when its last line, the one with ``"row": "cell"``, is complete and follows as many lines as it
counts. Other lines are moved to ``rows.damaged.jsonl`` and their cells run again.
"""

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla.runs.records import Record, dumps

ROWS = "rows.jsonl"
DAMAGED = "rows.damaged.jsonl"


class JsonLog:
    """A file of JSON lines. An append is one write: a kill damages at most its last line, a full disk none.

    encode: turns a value into JSON; the default writes non-finite numbers as strings.
    """

    def __init__(self, file: Path, encode: Callable[[Any], str] = dumps) -> None:
        self.file, self._encode = file, encode

    def read(self) -> list[tuple[bytes, Any]]:
        """Every line with its value, ``None`` for a damaged one; an empty list if there is no file."""
        return decode_lines(self.file.read_bytes()) if self.file.exists() else []

    def append(self, values: Iterable[Any], *, sync: bool = True) -> None:
        """Append values in one write, by default synced to disk; if it fails, the file is cut back to its old size."""
        data = "".join(self._encode(value) + "\n" for value in values).encode()
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
                if sync:
                    _sync(descriptor)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise explain_write(error, self.file) from error
        finally:
            os.close(descriptor)

    def keep(self, lines: Iterable[bytes]) -> None:
        """Replace the file's content by these lines, atomically and only if it differs."""
        data = b"".join(line + b"\n" for line in lines)
        if not self.file.exists() or self.file.read_bytes() != data:
            write_atomically(self.file, data)


def decode_lines(data: bytes) -> list[tuple[bytes, Any]]:
    """Lines of JSON with their values; ``None`` for lines that are not JSON and for a last line without its end."""
    *lines, tail = data.split(b"\n")
    return [(line, _decode(line)) for line in lines] + ([(tail, None)] if tail else [])


@dataclass(frozen=True)
class Parsed:
    """The rows of finished cells, and the lines that belong to none."""

    rows: list[Record]
    good_lines: list[bytes]
    damaged_lines: list[bytes]


def parse(data: bytes) -> Parsed:
    """Separate the lines of finished cells from what an interrupted write left behind."""
    good: list[tuple[bytes, Record]] = []
    damaged: list[tuple[bytes, Record]] = []
    pending: list[tuple[bytes, Record]] = []
    for line, row in decode_lines(data):
        is_row = isinstance(row, dict) and isinstance(row.get("cell"), str)
        if pending and not (is_row and pending[-1][1]["cell"] == row["cell"]):
            damaged += pending
            pending = []
        if not is_row:
            damaged.append((line, row))
            continue
        pending.append((line, row))
        if row.get("row") == "cell":
            is_whole = row.get("rows", len(pending)) == len(pending)  # else a line was lost: the cell is not finished
            (good if is_whole else damaged).extend(pending)
            pending = []
    lines = [line for line, _ in damaged + pending if line.strip()]
    return Parsed([row for _, row in good], [line for line, _ in good], lines)


def read_rows(path: Path) -> list[Record]:
    """The rows of all finished cells of a file or a run folder."""
    file = path / ROWS if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"no rows at {file}; expected the output folder of `efla reproduce` or a .jsonl file")
    return parse(file.read_bytes()).rows


def repair(folder: Path) -> int:
    """Move lines of unfinished cells to ``rows.damaged.jsonl``; returns their number."""
    file = folder / ROWS
    if not file.exists():
        return 0
    parsed = parse(file.read_bytes())
    if parsed.damaged_lines:
        with open(folder / DAMAGED, "ab") as damaged:
            damaged.write(b"".join(line + b"\n" for line in parsed.damaged_lines))
            damaged.flush()
            os.fsync(damaged.fileno())
    JsonLog(file).keep(parsed.good_lines)
    return len(parsed.damaged_lines)


def append_rows(folder: Path, rows: Sequence[Record]) -> None:
    """Append one cell's rows in a single synced write."""
    assert rows and rows[-1].get("row") == "cell", "a cell's last row marks it as finished"
    JsonLog(folder / ROWS).append(rows)


def write_atomically(file: Path, data: bytes) -> None:
    """Replace a file so that readers see the old or the new content, never a mix, even after a kill."""
    file = Path(os.path.realpath(file))  # a link stays a link
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def explain_write(error: OSError, path: Path) -> OSError:
    """The same error with the path, the reason and what to do."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "the disk is full" if is_full else (error.strerror or str(error))
    advice = "Make room" if is_full else "Choose another --output"
    return OSError(
        error.errno or 0,
        f"cannot write to {path}: {reason}. {advice} and run the same command again; finished work is safe",
    )


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # devices and pipes cannot be synced
            raise
