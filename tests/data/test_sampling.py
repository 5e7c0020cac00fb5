"""Which rows are trained on: a pure function of (seed, step, rank, world)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from efla.data.sampling import RowSampler, TokenStream, consecutive_rows, document_boundaries, permute


def stream(count: int, parts: int = 1) -> TokenStream:
    """Token i is i mod 65536, in several arrays."""
    return TokenStream(*np.array_split(np.arange(count).astype(np.uint16), parts))


@pytest.mark.parametrize("order", ["uniform", "shuffled"])
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(order, world):
    sampler = RowSampler(stream(5000), length=16, rows=6, seed=42, order=order)
    for step in (0, 7, 1000):
        together = torch.cat([sampler.batch(step, rank, world) for rank in range(world)])
        assert torch.equal(together, sampler.batch(step))


def test_rows_are_the_tokens_at_their_offsets():
    sampler = RowSampler(stream(3000, parts=7), length=500, rows=4, seed=1)
    for offset, row in zip(sampler.offsets(3), sampler.batch(3), strict=True):
        assert row.tolist() == list(range(offset, offset + 500))


def test_uniform_offsets_reach_every_place_about_equally():
    sampler = RowSampler(stream(40), length=31, rows=1000, seed=0)
    counts = np.bincount(sampler.offsets(0), minlength=10)
    assert len(counts) == 10
    assert counts.min() > 60
    assert counts.max() < 140


def test_a_shuffled_pass_takes_every_row_once_and_the_next_another_order():
    sampler = RowSampler(stream(16 * 30 + 5), length=16, rows=10, seed=3, order="shuffled")
    passes = [np.concatenate([sampler.offsets(step) for step in range(3 * n, 3 * n + 3)]) for n in range(2)]
    for one in passes:
        assert sorted(one) == [16 * row for row in range(30)]
    assert list(passes[0]) != list(passes[1])


def test_offsets_are_splitmix64_in_plain_integers():
    """A change here would break every resumed run, so the numbers are worked out a second time."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    for seed in (42, 43):
        sampler = RowSampler(stream(60_000), length=100, rows=3, seed=seed)
        for step in (0, 10_000_000):
            numbers = range(3 * step, 3 * step + 3)
            expected = [mix((n * 0x9E3779B97F4A7C15 + mix(seed)) % 2**64) % 59_901 for n in numbers]
            assert sampler.offsets(step).tolist() == expected


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 65, 1000])
def test_a_permutation_of_any_size_hits_every_number_once(count):
    numbers = np.arange(count, dtype=np.uint64)
    assert sorted(permute(numbers, count, 5, 2)) == list(range(count))


def test_consecutive_rows_cover_the_text_once():
    batches = list(consecutive_rows(stream(103), length=10, rows=4))
    assert [tuple(b.shape) for b in batches] == [(4, 10), (4, 10), (2, 10), (1, 3)]
    assert torch.cat([b.flatten() for b in batches]).tolist() == list(range(103))
    assert [tuple(b.shape) for b in consecutive_rows(stream(103), 10, 4, limit=21)] == [(2, 10)]


def test_documents_start_at_the_bos_token_and_at_each_row():
    rows = torch.tensor([[5, 0, 7, 8], [0, 1, 2, 0]])
    assert document_boundaries(rows, 0).tolist() == [0, 1, 4, 7, 8]


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="cannot be shared evenly by 4 ranks"):
        RowSampler(stream(100), 10, 6, 0).batch(0, 0, 4)
    with pytest.raises(ValueError, match="5 tokens, fewer than one row of 10"):
        RowSampler(stream(5), 10, 6, 0)
    with pytest.raises(ValueError, match="unsigned"):
        TokenStream(np.zeros(3, dtype=np.int64))
