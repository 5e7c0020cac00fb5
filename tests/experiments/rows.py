"""Rows without the fields that differ between two runs of the same cell; everything else is reproduced."""

from typing import Any


def without_volatile(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("started", "wall_seconds", "timing")}
