"""Start a run, kill it with SIGKILL at a random moment, again and again: ``kill_driver.py FOLDER TIMES EXECUTOR``.

Imports once and forks, so that a kill costs milliseconds. A moment is a number of function calls, so that it does not depend
on the machine's speed; a sitting dies at the latest when it has written five cells. Prints how many of the kills hit a running
process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

from rich.console import Console
from tiny_experiment import Tiny, TinyConfig

from efla.experiments.runner import run
from efla.runs import rows

CELLS_OF_A_SITTING = 5


def run_until(folder: Path, executor: str, cell: int, call: int | None, note: Path) -> None:
    """Run, and die at that call after so many cells were begun to be written, or at one cell too many; notes all counts."""
    calls = [0]
    write = rows._write_all.__code__

    def watch(frame: FrameType, event: str, argument: object) -> None:
        calls[-1] += event in ("call", "c_call")
        if event == "call" and frame.f_code is write:
            calls.append(0)
        if len(calls) > CELLS_OF_A_SITTING or (len(calls) - 1 == cell and calls[-1] == call):
            note.write_text(" ".join(map(str, calls)))
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)
    run(Tiny(TinyConfig(cells=120)), folder, executor=executor, workers=2, console=Console(quiet=True))


def main() -> None:
    folder, times, executor = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    draw, hits, note = random.Random(), 0, folder.with_name("calls")
    cell, call = CELLS_OF_A_SITTING, None
    for number in range(times):
        child = os.fork()
        if child == 0:
            run_until(folder, executor, cell, call, note)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        hits += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if number == 0:  # the first shows how many calls there are
            counts = [int(count) for count in note.read_text().split()]
        cell = draw.randrange(CELLS_OF_A_SITTING)
        call = draw.randint(1, counts[cell])
    print(hits)


if __name__ == "__main__":
    main()
