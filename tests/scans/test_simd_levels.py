"""The conformance suite of the native backend, at every instruction set of this CPU but the one in use.

The set in use is what the rest of the tests run on.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from efla.scans.backends import native

HERE = Path(__file__).parent
SUITE = ["test_conformance.py", "test_hard_numbers.py", "test_composition.py", "test_long_sequences.py"]


def other_levels() -> list[str]:
    if native.unavailable() is not None:
        return []
    return [level for level in native._native.simd_levels() if level != native._native.active_simd()]


@pytest.mark.parametrize("level", other_levels())
def test_the_conformance_suite_passes_with(level):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "native"]
    done = subprocess.run(
        [*command, "-m", "not slow", *(str(HERE / name) for name in SUITE)],
        env={**os.environ, "EFLA_SIMD": level},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    summary = done.stdout.splitlines()[-1]
    assert "passed" in summary and "skipped" not in summary
