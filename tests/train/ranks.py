"""Starts several processes that form one gloo process group, each running a check of ``rank_checks.py``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("rank_checks.py")


def run_ranks(check: str, world: int, results: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The results of all ranks; fails with the output of one that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(SCRIPT), check, str(results / f"{check}-{world}-{rank}.json")]
        command += [json.dumps(arguments, default=str)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [json.loads((results / f"{check}-{world}-{rank}.json").read_text()) for rank in range(world)]
