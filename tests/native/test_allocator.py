"""Freed memory is kept where glibc is the C library, so that the same tensors are not faulted in again at every step."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from efla.native import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
def faults():
    for _ in range(20):
        tensors = [torch.ones(2**21) for _ in range(4)]  # 8 MiB each
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults()
before = faults()
print(faults() - before)
"""


def count_faults(what: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, what], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_the_same_tensors_are_faulted_in_once():
    assert count_faults("keep") < 100
