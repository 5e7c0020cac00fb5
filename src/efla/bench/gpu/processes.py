"""Runs the checks that need a process of their own, and reads what they print: one JSON object per line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from efla.bench.gpu.compile_kernels import CompiledKernel
from efla.bench.gpu.traffic import Traffic


def compile_kernels(
    targets: tuple[str, ...],
    widths: tuple[int, ...],
    dtype: str,
    *,
    packed: bool = False,
    all_configs: bool = False,
    jobs: int = 1,
) -> Iterator[tuple[str, int, list[CompiledKernel]]]:
    """(target, width, kernels) as each is done, ``jobs`` at a time."""
    options = ["--packed"] * packed + ["--all-configs"] * all_configs
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(_rows, "efla.bench.gpu.compile_kernels", target, str(width), dtype, *options): (target, width)
            for target in targets
            for width in widths
        }
        for done in as_completed(running):
            yield *running[done], [CompiledKernel(**row) for row in done.result()]  # type: ignore[arg-type]


def count_traffic(widths: tuple[int, ...]) -> list[Traffic]:
    """Bytes per token and head of each rule and width."""
    return [Traffic(**row) for width in widths for row in _rows("efla.bench.gpu.traffic", str(width))]  # type: ignore[arg-type]


def _rows(module: str, *arguments: str) -> list[dict[str, object]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    for name in ("TRITON_INTERPRET", "PYTHONWARNINGS"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[3:])} failed:\n{done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
