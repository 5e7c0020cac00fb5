"""Fixed seeds, threads and rules, and fresh allocations filled with NaN, so that nothing passes by reading stale memory."""

from __future__ import annotations

import os

import pytest
import torch

from efla import rules
from efla.native import kernels, rows

# Bit-identical results may depend on it: for this process and those it starts, in fixtures of modules and in every test.
THREADS = int(os.environ.get("EFLA_TEST_THREADS", "1"))


def pytest_configure() -> None:
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    registered = dict(rules._RULES)
    yield
    torch.use_deterministic_algorithms(False)
    rules._RULES.clear()
    rules._RULES.update(registered)


@pytest.fixture
def onednn_products(monkeypatch):
    """Products of float32 by oneDNN on every CPU, and of every size."""
    if kernels is None or not torch.backends.mkldnn.is_available():
        pytest.skip("needs our kernels and a torch with oneDNN")
    monkeypatch.setattr(rows, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(rows, "_SMALL_PRODUCT", 0)
