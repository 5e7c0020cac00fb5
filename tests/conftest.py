"""Fixed seeds, one thread, and fresh allocations filled with NaN, so that nothing passes by reading stale memory."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
