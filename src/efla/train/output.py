"""A run's output folder: held by one run at a time, with the config that made it.

config.json      the resolved config, the model's, versions, git commit, machine
metrics.jsonl    every step, validation and sample
checkpoints/     what a run is continued from
model/           the result, as transformers loads it
data/            tokens of text that was not prepared
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from efla.runs import provenance
from efla.runs.lock import LOCK, take
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically
from efla.train.config import TrainConfig

CONFIG = "config.json"
_FORMAT = 1


class OutputFolder:
    """The folder of a run, locked by the rank that writes to it: ``with OutputFolder(path, config) as folder``."""

    def __init__(self, path: Path, config: TrainConfig, *, writes: bool = True) -> None:
        self.path, self.config, self.writes = path, config, writes
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> OutputFolder:
        if self.writes:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = take(self.path)
            except OSError as error:
                raise explain_write(error, self.path) from error
            self._check_config()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()  # closing releases the lock; so does a kill

    def _check_config(self) -> None:
        file = self.path / CONFIG
        record: Record = {
            "format": _FORMAT,
            "config": self.config.record(),
            "fixed": self.config.fixed(),
            "model": json.loads(self.config.model_config().to_json_string()),
            "versions": provenance.versions(),
            "commit": provenance.git_commit(),
            "machine": provenance.machine(),
        }
        if not file.exists():
            others = [path.name for path in self.path.iterdir() if path.name != LOCK]
            if others:
                raise ValueError(
                    f"{self.path} holds {', '.join(sorted(others)[:3])} but no {CONFIG} of a run; nothing was changed. "
                    "Choose another --output"
                )
            write_atomically(file, (json.dumps(json.loads(dumps(record)), indent=2) + "\n").encode())
            return
        try:
            found = json.loads(file.read_text())
            there = found["fixed"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{file} is not the config of a training run ({error}); choose another --output"
            ) from error
        check_same(there, record["fixed"], str(self.path))


def check_same(there: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Refuse to continue a run with what would make it another run."""
    differences = [
        f"{name}: {there.get(name)} there, {now.get(name)} now"
        for name in sorted(set(there) | set(now))
        if there.get(name) != now.get(name)
    ]
    if differences:
        raise ValueError(
            f"{where} holds a run with another config ({'; '.join(differences)}); nothing was changed. "
            "Choose another --output, or give the options that run was started with"
        )


def explain_write(error: OSError, path: Path) -> OSError:
    """The same error, saying what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "the disk is full" if full else (error.strerror or str(error))
    advice = "Make room" if full else "Choose another --output"
    return OSError(
        error.errno or 0,
        f"cannot write to {path}: {reason}. {advice} and run the same command; it continues where it was",
    )
