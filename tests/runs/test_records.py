"""Config fields are checked against their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from efla.runs.records import Count, Minimum, check_fields


@dataclass(frozen=True, kw_only=True)
class _Config:
    schedule: Literal["constant", "cosine"] = "constant"
    precision: Literal["float32", "bfloat16"] | None = None
    batch: Count = 1
    steps: Count | None = None
    lengths: tuple[Annotated[int, Minimum(2)], ...] = ()
    share: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


def test_values_within_their_limits_pass() -> None:
    _Config(schedule="cosine", precision="bfloat16", batch=3, steps=1, lengths=(2, 3), share=-1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "cosin"}, r"unknown schedule 'cosin'.*'cosine'"),
        ({"precision": "half"}, r"unknown precision 'half'; known precisions: float32, bfloat16"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lengths": (4, 1)}, "lengths must be at least 2, got 1"),
    ],
)
def test_values_outside_their_limits_are_errors(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _Config(**values)  # type: ignore[arg-type]
