"""One contender in a process and environment of its own: ``python worker.py DRIVER THREADS``. Needs nothing but numpy.

Reads commands and answers on standard output, one JSON object per line:

    {"load": file.npz, "work": "forward", "results": file.npz}   prepare a call, run it once, save what it computed
    {"repeats": 20}                                              {"seconds": mean of the calls, after a warm-up}
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

WARM_UP_SECONDS = 0.02
"""Calls before each sample that are not counted: caches fill, and the threads of the previous contender stop spinning."""


def serve(driver: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    spec = importlib.util.spec_from_file_location("driver", Path(__file__).parent / "drivers" / f"{driver}.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return answer(refused=f"{error}")
    answer(version=module.VERSION, work=module.WORK, worst_error=getattr(module, "WORST_ERROR", None))
    call = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            call = None  # frees the memory of the previous one
            with np.load(command["load"]) as arrays:
                call, read = module.prepare(command["work"], dict(arrays), threads)
            np.savez(command["results"], **read(call()))
            answer(loaded=True)
        else:
            start = time.perf_counter()
            while time.perf_counter() - start < WARM_UP_SECONDS:
                call()
            start = time.perf_counter()
            for _ in range(command["repeats"]):
                call()
            answer(seconds=(time.perf_counter() - start) / command["repeats"])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
