"""Starts several processes that form one gloo process group, each running a check of ``rank_checks.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fresh import run_fresh

SCRIPT = Path(__file__).with_name("rank_checks.py")


def run_ranks(check: str, world: int, results: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The results of all ranks; fails with what they printed if one failed, which ends the others."""
    files = [results / f"{check}-{world}-{rank}.json" for rank in range(world)]
    meeting = results / f"{check}-{world}-meeting"
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run_fresh(code, SCRIPT, check, meeting, json.dumps(arguments, default=str), *files)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in files]
