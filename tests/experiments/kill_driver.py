"""Start a run, kill it with SIGKILL at a random moment, again and again: ``kill_driver.py FOLDER TIMES EXECUTOR``.

Imports once and forks, so that a kill costs milliseconds. Prints how many of the kills hit a running process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rich.console import Console
from tiny_experiment import Tiny, TinyConfig

from efla.experiments.framework import run


def main() -> None:
    folder, times, executor = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    longest = 0.11 if executor == "inline" else 6.0  # a worker process imports torch first
    seconds = 0.02 if executor == "inline" else 0.2
    chance, hits = random.Random(), 0
    for _ in range(times):
        child = os.fork()
        if child == 0:
            run(
                Tiny(TinyConfig(cells=120, seconds=seconds)),
                folder,
                executor=executor,
                workers=2,
                console=Console(quiet=True),
            )
            os._exit(0)
        time.sleep(chance.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        hits += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    print(hits)


if __name__ == "__main__":
    main()
