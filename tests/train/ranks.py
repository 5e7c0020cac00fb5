"""Starts several processes that form one gloo process group, each running a check of ``rank_checks.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..processes import started

SCRIPT = Path(__file__).with_name("rank_checks.py")


def run_ranks(check: str, world: int, results: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The results of all ranks; fails with the output of the first that failed, and ends the others."""
    files = [results / f"{check}-{world}-{rank}.json" for rank in range(world)]
    meeting = results / f"{check}-{world}-meeting"
    with ThreadPoolExecutor(world) as pool, ExitStack() as running:
        waiting = []
        for rank, file in enumerate(files):
            command = [sys.executable, str(SCRIPT), check, str(meeting), str(file), json.dumps(arguments, default=str)]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            waiting.append(pool.submit(_finish, running.enter_context(started(command, env=place))))
        for rank in wait(waiting, return_when=FIRST_EXCEPTION).done:
            rank.result()
    return [json.loads(file.read_text()) for file in files]


def _finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}: {output[-4000:]}"
