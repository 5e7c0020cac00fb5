"""What every backend is tried on, and the loop that tries it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import efla
from efla.native import kernels
from efla.testing import ScanInputs, assert_matches_oracle, expect

RULES = efla.rules.names()
CONTRACTIVE = [name for name in RULES if efla.rules.get(name).contractive]
# "reference" is what they are compared with; "fla" takes tensors of a GPU, and its tests are in tests/bench/gpu.
BACKENDS = [n for n, reason in efla.backends().items() if reason is None and n not in ("reference", "fla")]


def _contenders() -> Iterator[str]:
    for backend in BACKENDS:
        yield backend
        if backend == "native":
            active = kernels.active_simd()
            yield from (f"native-{level}" for level in kernels.simd_levels() if level != active)


# Every backend, and "native" once more for each instruction set of this CPU that is not in use.
CONTENDERS = list(_contenders())


@contextmanager
def contender(name: str) -> Iterator[str]:
    """Switch to a contender's instruction set and give the name of its backend."""
    backend, _, level = name.partition("-")
    before = kernels.active_simd() if level else ""
    try:
        if level:
            kernels.set_simd(level)
        yield backend
    finally:
        if level:
            kernels.set_simd(before)


def assert_all_match(inputs: ScanInputs, *, chunk_sizes: Sequence[int] = (64,)) -> None:
    """Every contender is within the error budget of the float64 oracle, which runs once for all of them."""
    expected = expect(inputs)
    problems = []
    for name in CONTENDERS:
        for chunk_size in chunk_sizes:
            with contender(name) as backend:
                try:
                    assert_matches_oracle(expected, backend, chunk_size=chunk_size)
                except AssertionError as error:
                    problems.append(f"{name}: {error}")
                except Exception as error:
                    raise AssertionError(f"{name}, {inputs}, chunk_size {chunk_size}: {error!r}") from error
    assert not problems, "\n".join(problems)


# id -> arguments of efla.testing.make_inputs; lengths are awkward on purpose.
SHAPES = {
    "dense": {"length": 100},
    "one_token": {"length": 1},
    "chunk_less_one": {"length": 63},
    "one_chunk": {"length": 64},
    "chunk_and_one": {"length": 65, "initial_state": True},
    "initial_state": {"length": 80, "initial_state": True},
    "packed": {"packed": [1, 63, 64, 65, 7]},
    "packed_with_state_and_empty": {"packed": [5, 0, 70], "initial_state": True},
    "grouped_heads": {"length": 70, "key_heads": 2, "value_heads": 6},
    "wide_values": {"length": 70, "key_dim": 8, "value_dim": 24},
    "odd_widths": {"length": 33, "key_dim": 5, "value_dim": 3, "key_heads": 1, "value_heads": 1},
    "l2_norm": {"length": 70, "qk_l2norm": True},
    "l2_norm_of_q": {"length": 70, "qk_l2norm": "q"},
    "l2_norm_of_k": {"length": 5, "qk_l2norm": "k", "initial_state": True},
}
