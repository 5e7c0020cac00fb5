"""A folder held by one process at a time."""

from __future__ import annotations

from pathlib import Path
from typing import IO

LOCK = ".lock"


def take(path: Path) -> IO[bytes]:
    """Lock a folder that is there and return what holds the lock: closing it releases it, and so does a kill."""
    lock = open(path / LOCK, "ab")  # noqa: SIM115  (held until the run ends)
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
