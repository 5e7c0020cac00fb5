"""Fixtures of the evaluation tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.models import llama, trained
from tests.evaluation.small_data import write_small_data


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A data folder and models as they are saved."""
    root = tmp_path_factory.mktemp("evaluation")
    write_small_data(root / "data")
    for name in ("efla", "softmax"):
        trained(name).save_pretrained(root / "models" / name)
    llama().save_pretrained(root / "models" / "llama")
    return root
