"""Typed configs as plain JSON records and back, so that a row says exactly what was run."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, TypeVar, cast

from efla.errors import unknown_name

Record = dict[str, Any]
T = TypeVar("T")

GRID = {"grid": True}
"""Metadata of a config field that chooses which cells are run; such a field may differ between runs into one folder."""


def to_record(config: object) -> Record:
    """A dataclass as a record of JSON values, tuples as lists."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return cast(Record, json.loads(dumps(dataclasses.asdict(config))))


def from_record(cls: type[T], record: Record) -> T:
    """The dataclass a record was made from; unknown keys are an error."""
    known = {field.name for field in dataclasses.fields(cast(Any, cls))}
    for key in record:
        if key not in known:
            raise unknown_name(f"field of {cls.__name__}", key, known)
    return cls(**{key: _tuples(value) for key, value in record.items()})


def protocol_of(config: object) -> Record:
    """The part of a config that must be the same for all rows of a folder: everything but the grid."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    grid = {field.name for field in dataclasses.fields(config) if field.metadata.get("grid")}
    return {key: value for key, value in to_record(config).items() if key not in grid}


def dumps(value: object) -> str:
    """JSON on one line. NaN and infinities become the strings "nan", "inf", "-inf": JSON itself has no such numbers."""
    return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def number(value: object) -> float:
    """A number of a row, with the strings for non-finite ones turned back; ``None`` is not-a-number."""
    return math.nan if value is None else float(cast(Any, value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
