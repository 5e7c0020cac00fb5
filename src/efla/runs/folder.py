"""A run's output folder: its config, its rows, and a lock so that only one run writes to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from efla.runs.lock import take
from efla.runs.records import Record, dumps
from efla.runs.rows import ROWS, append_rows, parse, repair, write_atomically

CONFIG = "config.json"
_FORMAT = 1


class RunFolder:
    """An output folder held by this process: ``with RunFolder.open(path, name, protocol) as folder``.

    Opening makes the folder, refuses one whose config differs or that another run holds, and repairs half-written rows.
    """

    def __init__(self, path: Path, lock: IO[bytes], repaired: int) -> None:
        self.path = path
        self.repaired = repaired
        self._lock = lock

    @classmethod
    def open(cls, path: Path, experiment: str, protocol: Record) -> RunFolder:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = take(path)
        except OSError as error:
            raise OSError(
                error.errno or 0,
                f"cannot write to the output folder {path}: {error.strerror}; choose another with --output",
            ) from error
        try:
            _check_config(path, experiment, protocol)
            repaired = repair(path)
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, repaired)

    def rows(self) -> list[Record]:
        """The rows of all finished cells."""
        file = self.path / ROWS
        return parse(file.read_bytes()).rows if file.exists() else []

    def finished(self) -> set[str]:
        """Ids of the finished cells."""
        return {row["cell"] for row in self.rows() if row.get("row") == "cell"}

    def append(self, rows: Sequence[Record]) -> None:
        """Write one finished cell."""
        append_rows(self.path, rows)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()  # closing releases the lock; so does a kill


def read_config(path: Path) -> Record:
    """The config a folder's rows were made with."""
    try:
        config: Any = json.loads((path / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(
            f"{path / CONFIG} is not valid JSON ({error}); restore it or choose another --output"
        ) from error
    if not isinstance(config, dict) or "experiment" not in config or "protocol" not in config:
        raise ValueError(f"{path / CONFIG} is not the config of a run; choose another --output")
    return config


def _check_config(path: Path, experiment: str, protocol: Record) -> None:
    wanted: Record = json.loads(dumps({"format": _FORMAT, "experiment": experiment, "protocol": protocol}))
    if not (path / CONFIG).exists():
        if (path / ROWS).exists():
            raise ValueError(
                f"{path} holds rows but no {CONFIG}, so they cannot be told from others; choose another --output"
            )
        write_atomically(path / CONFIG, (json.dumps(wanted, indent=2) + "\n").encode())
        return
    found = read_config(path)
    differences = [] if found.get("format") == _FORMAT else [f"format: {found.get('format')} there, {_FORMAT} now"]
    if found["experiment"] != experiment:
        differences.append(f"experiment: {found['experiment']} there, {experiment} now")
    for key in sorted(set(found["protocol"]) | set(wanted["protocol"])):
        there, now = found["protocol"].get(key), wanted["protocol"].get(key)
        if there != now:
            differences.append(f"{key}: {there} there, {now} now")
    if differences:
        raise ValueError(
            f"{path} holds rows of another config ({'; '.join(differences)}); nothing was changed. "
            "Choose another --output, or give the options those rows were made with"
        )
