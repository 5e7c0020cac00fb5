"""Choosing a part of a grid of groups, where each group is a product of its fields."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def part_of(groups: Sequence[Any], asked: Mapping[str, tuple[Any, ...]], otherwise: Any) -> tuple[Any, ...]:
    """The part of a grid with the values asked for; if it lacks one of their combinations, ``otherwise`` with the values.

    groups, otherwise: named tuples of tuples. asked: field -> values.
    """

    def there(combination: tuple[Any, ...]) -> bool:
        return any(
            all(value in getattr(group, name) for name, value in zip(asked, combination, strict=True))
            for group in groups
        )

    if not all(map(there, itertools.product(*asked.values()))):
        return (otherwise._replace(**asked),)
    narrowed = (
        group._replace(
            **{name: tuple(v for v in getattr(group, name) if v in values) for name, values in asked.items()}
        )
        for group in groups
    )
    return tuple(group for group in narrowed if all(group))
