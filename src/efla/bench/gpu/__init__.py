"""Checks of the fla backend for GPU users: ahead-of-time compilation, memory traffic, conformance and throughput.

``import efla`` loads nothing from here, and Triton is imported only inside the functions that need it.
"""

import json
import os
import subprocess
import sys
from typing import Any


def run_module(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run ``python -m module`` without a GPU and return the JSON objects it prints, one per line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    for name in ("TRITON_INTERPRET", "PYTHONWARNINGS"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[3:])} failed:\n{done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
