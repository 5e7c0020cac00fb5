"""A log of answered requests, from which an interrupted evaluation resumes."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla.runs.records import dumps
from efla.runs.rows import JsonLog


class ResponseLog:
    """JSON lines of (request key, answer), appended in one synced write per batch.

    The first line holds the model and settings; a log of others is refused. Damaged lines are dropped.
    """

    def __init__(self, path: Path, belongs_to: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = JsonLog(path, json.dumps)
        self._answers: dict[str, Any] = {}
        header = dumps({"responses_of": belongs_to})
        first, *lines = self._log.read() or [(b"", None)]
        if first[1] is None:  # the first write was cut off
            lines = []
        elif first[1] != json.loads(header):
            raise ValueError(
                f"{path} holds answers for other settings ({first[1]} there, {header} now); nothing was changed. "
                "Choose another --output, or remove that file"
            )
        kept = [(line, entry) for line, entry in lines if isinstance(entry, list) and len(entry) == 2]
        self._answers = {key: answer for _, (key, answer) in kept}
        self._log.keep([header.encode(), *(line for line, _ in kept)])

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, kind: str, arguments: Sequence[Any]) -> Any | None:
        """The answer to a request, bit-identical to the computed one, or ``None`` if it is not known."""
        return self._answers.get(request_key(kind, arguments))

    def add(self, answers: Sequence[tuple[str, Sequence[Any], Any]]) -> None:
        """Append answers: (kind, arguments, answer) each."""
        keyed = [(request_key(kind, arguments), answer) for kind, arguments, answer in answers]
        self._answers.update(keyed)
        self._log.append(keyed)


def remove_responses(path: Path) -> None:
    """Delete a log, and its folder if it is empty then."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def request_key(kind: str, arguments: Sequence[Any]) -> str:
    """A hash of a request's kind and arguments."""
    return hashlib.sha256(json.dumps([kind, *arguments], default=str).encode()).hexdigest()[:32]
