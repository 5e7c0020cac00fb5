"""Output folders: locked by one process at a time, with the config that their content was made with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from efla.runs.records import Record, dumps
from efla.runs.rows import ROWS, append_rows, explain_write, read_rows, repair, write_atomically

CONFIG = "config.json"
LOCK = ".lock"
FORMAT = 1


def lock_folder(path: Path) -> IO[bytes]:
    """Create a folder if needed and lock it. Closing the returned file releases the lock; so does a kill."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / LOCK, "ab")  # noqa: SIM115  (held until the run ends)
    except OSError as error:
        raise explain_write(error, path) from error
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RuntimeError(f"another run is writing to {path}; wait for it or choose another --output") from error
    return lock


def require_same(there: Mapping[str, Any], now: Mapping[str, Any], holds: str) -> None:
    """Raise an error that names every key whose value differs. holds: what was found, to start the message with."""
    differences = [
        f"{key}: {there.get(key)} there, {now.get(key)} now"
        for key in sorted({*there, *now})
        if there.get(key) != now.get(key)
    ]
    if differences:
        raise ValueError(
            f"{holds} ({'; '.join(differences)}); nothing was changed. "
            "Choose another --output, or use the same options as before"
        )


def write_config(path: Path, config: Record) -> None:
    """Write a folder's config file."""
    data = json.dumps(json.loads(dumps(config)), indent=2) + "\n"
    write_atomically(path / CONFIG, data.encode())


class RunFolder:
    """A locked folder of rows: ``with RunFolder.open(path, name, protocol) as folder``.

    Opening creates the folder, repairs half-written rows, and refuses a folder that has another config or is in use.
    """

    def __init__(self, path: Path, repaired: int) -> None:
        self.path, self.repaired = path, repaired

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, experiment: str, protocol: Record) -> Iterator[RunFolder]:
        with lock_folder(path):
            _check_config(path, experiment, protocol)
            yield cls(path, repair(path))

    def rows(self) -> list[Record]:
        """The rows of all finished cells."""
        return read_rows(self.path) if (self.path / ROWS).exists() else []

    def finished(self) -> set[str]:
        """Ids of the finished cells."""
        return {row["cell"] for row in self.rows() if row.get("row") == "cell"}

    def append(self, rows: Sequence[Record]) -> None:
        """Write one finished cell."""
        append_rows(self.path, rows)


def read_config(path: Path) -> Record:
    """The config that a folder's rows were made with."""
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
    """Write the config of a new folder; refuse one that holds something of another config."""
    content = {file.name for file in path.iterdir()} - {LOCK, CONFIG}
    now = {"format": FORMAT, "experiment": experiment, "protocol": json.loads(dumps(protocol))}
    if (path / CONFIG).exists():
        there = read_config(path)
        if content:  # none was written by a command that failed at once
            a, b = ({**config, **config["protocol"], "protocol": None} for config in (there, now))
            require_same(a, b, f"{path} holds rows of another config")
            return
    elif ROWS in content:
        raise ValueError(f"{path} holds rows but no {CONFIG} that says what they are; choose another --output")
    write_config(path, now)
