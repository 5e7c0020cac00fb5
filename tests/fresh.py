"""Code in a process of its own, in which neither efla nor transformers has been imported: ``run_fresh(code)``.

An interpreter that imports torch costs seconds. One server per pytest process has done that; each call forks it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes import LAST_RESORT

SERVER = """
import gc, json, os, signal, sys
import torch, torch._inductor.config  # which transformers imports and efla does not care about
gc.freeze()  # a fork that ends does not look through all of torch again
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, *request["outputs"])):
    os.dup2(os.open(name, os.O_RDWR), number)
signal.alarm(request["seconds"])  # ends a child that hangs
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = ["-c", *request["arguments"]]
sys.path[0] = ""
exec(request["code"], {"__name__": "__main__"})
"""


@functools.cache
def _server(pid: int) -> subprocess.Popen[str]:
    # It ends when this process does: its input is closed then.
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_fresh(code: str, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What ``python -c code arguments`` would do with torch imported already; the environment is the caller's."""
    server = _server(os.getpid())
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("out", "err")]
        for path in outputs:
            path.touch()
        request = {
            "seconds": LAST_RESORT,
            "code": code,
            "arguments": [str(x) for x in arguments],
            "outputs": [str(path) for path in outputs],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ),
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in outputs))
