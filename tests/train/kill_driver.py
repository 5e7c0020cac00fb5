"""Trains into a folder while being killed, over and over, then lets it finish: ``kill_driver.py FOLDER SEED sync|async``.

Children are forked from a process that has done nothing yet, so that each starts at once.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from small import small

import efla.models.modeling_efla  # noqa: F401  (imported once, before the forks)
from efla.train import checkpoint, loop


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(output: Path, place: str | None, count: int, **changes) -> None:
    """Train; die at the ``count``-th time that ``place`` in a save is reached: no tensors yet, tensors, all but the rename."""
    reached = 0

    def dying(function):
        def wrapper(*args, **kwargs):
            nonlocal reached
            reached += 1
            if reached == count:
                die()
            return function(*args, **kwargs)

        return wrapper

    if place == "tensors":
        checkpoint._write = dying(checkpoint._write)
    elif place == "state":
        checkpoint.write_atomically = dying(checkpoint.write_atomically)
    elif place == "rename":
        checkpoint._sync = dying(checkpoint._sync)
    loop.run(small(steps=40, save_every=4, **changes), output)


def die_at_file(output: Path, count: int) -> None:
    """Die at the ``count``-th opening, renaming, making or removing of something in ``output``, in whichever thread."""
    left = itertools.count(count - 1, -1)

    def watch(event: str, args: tuple) -> None:
        is_file = event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(output) in str(args[0])
        if is_file and next(left) == 0:
            die()

    sys.addaudithook(watch)


def fork(output: Path, place: str | None = None, count: int = 0, **changes) -> int:
    child = os.fork()
    if child == 0:
        try:
            if place == "file":
                die_at_file(output, count)
            train(output, place, count, **changes)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    # As the test does: from the variable alone MKL takes another number.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    output, seed = Path(sys.argv[1]), int(sys.argv[2])
    changes = {"async_save": sys.argv[3] == "async"}
    draw = random.Random(seed)
    for place in ("tensors", "state", "rename"):
        code = fork(output, place, draw.randint(1, 3), **changes)
        assert code == -signal.SIGKILL, (place, code)
    for _ in range(6):
        code = fork(output, "file", draw.randint(1, 40), **changes)
        assert code == -signal.SIGKILL, code
    assert fork(output, **changes) == 0
