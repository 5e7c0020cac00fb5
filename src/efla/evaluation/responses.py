"""A log of answered requests, from which an interrupted evaluation resumes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.runs.records import dumps
from efla.runs.rows import write_atomically


class ResponseLog:
    """JSON lines of (request key, answer), appended in one synced write per batch.

    The first line holds the model and settings; a log of others is refused. Damaged lines are dropped.
    """

    def __init__(self, path: Path, belongs_to: dict[str, Any]) -> None:
        self.path = path
        self._answers: dict[str, Any] = {}
        header = json.loads(dumps({"responses_of": belongs_to}))
        if path.exists():
            self._read(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (dumps(header) + "\n").encode())

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, kind: str, arguments: Sequence[Any]) -> Any | None:
        """The answer to a request, bit-identical to the computed one, or ``None`` if it is not known."""
        return self._answers.get(request_key(kind, arguments))

    def add(self, answers: Sequence[tuple[str, Sequence[Any], Any]]) -> None:
        """Append answers: (kind, arguments, answer) each."""
        lines = []
        for kind, arguments, answer in answers:
            key = request_key(kind, arguments)
            self._answers[key] = answer
            lines.append(json.dumps([key, answer]) + "\n")
        with open(self.path, "ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self, header: dict[str, Any]) -> None:
        complete, _, tail = self.path.read_bytes().rpartition(b"\n")
        lines = complete.split(b"\n")
        found = _decoded(lines[0])
        if found is None:  # the first write was cut off
            write_atomically(self.path, (dumps(header) + "\n").encode())
            return
        if found != header:
            raise ValueError(
                f"{self.path} holds answers for other settings ({found} there, {header} now); nothing was changed. "
                "Choose another --output, or remove that file"
            )
        good = [lines[0]]
        for line in lines[1:]:
            entry = _decoded(line)
            if isinstance(entry, list) and len(entry) == 2:
                self._answers[entry[0]] = entry[1]
                good.append(line)
        if tail or len(good) != len(lines):
            write_atomically(self.path, b"".join(line + b"\n" for line in good))


def remove_responses(path: Path) -> None:
    """Delete a log, and its folder if it is empty then."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _decoded(line: bytes) -> Any | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def request_key(kind: str, arguments: Sequence[Any]) -> str:
    """A hash of a request's kind and arguments."""
    return hashlib.sha256(json.dumps([kind, *arguments], default=str).encode()).hexdigest()[:32]
