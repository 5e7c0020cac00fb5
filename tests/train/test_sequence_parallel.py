"""One sequence over several ranks equals the sequence on one rank, forwards and backwards."""

from __future__ import annotations

import pytest

from tests.train.ranks import run_ranks


@pytest.mark.parametrize(
    ("world", "dtype", "length", "tolerance"),
    [(2, "float64", 22, 1e-12), pytest.param(4, "float64", 260, 1e-11, marks=pytest.mark.slow)],
)
def test_split_rows_give_the_loss_and_gradients_of_whole_rows(world, dtype, length, tolerance, tmp_path):
    for result in run_ranks("sequence_parallel", world, tmp_path, dtype=dtype, length=length, size=world):
        assert len(result) == 8
        for name, (loss_error, gradient_error) in result.items():
            assert loss_error < tolerance, name
            assert gradient_error < tolerance, name
