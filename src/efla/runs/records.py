"""Typed configs as JSON records and back, so that every row holds the config it was made with."""

import dataclasses
import json
import math
import types
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from efla.errors import check_names, unknown_name

Record = dict[str, Any]
T = TypeVar("T")

GRID = {"grid": True}
"""Metadata of a config field that chooses which cells are run; such a field may differ between runs into one folder."""


class Minimum(NamedTuple):
    """The smallest allowed value of a config field: ``batch: Annotated[int, Minimum(1)]``."""

    value: float


Count = Annotated[int, Minimum(1)]


def check_fields(config: object) -> None:
    """Raise ``ValueError`` for a field that is not one of its ``Literal`` choices or is below its ``Minimum``.

    Call it in ``__post_init__``. ``None`` passes; the items of a tuple are checked one by one.
    """
    assert dataclasses.is_dataclass(config)
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        _check(field.name, getattr(config, field.name), hints[field.name])


def _check(name: str, value: Any, hint: Any) -> None:
    kind, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return
    if kind is Literal and value not in arguments:
        raise unknown_name(name, value, map(str, arguments))
    if kind is Annotated:
        for limit in hint.__metadata__:
            if isinstance(limit, Minimum) and value < limit.value:
                raise ValueError(f"{name} must be at least {limit.value:g}, got {value}")
    if kind in (Union, types.UnionType):  # of one type with limits and None
        for part in arguments:
            _check(name, value, part)
    if kind is tuple and arguments[1:] == (...,):
        for item in value:
            _check(name, item, arguments[0])


def to_record(config: object) -> Record:
    """A dataclass as a record of JSON values, tuples as lists."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return cast(Record, json.loads(dumps(dataclasses.asdict(config))))


def from_record(cls: type[T], record: Record) -> T:
    """The dataclass a record was made from; unknown keys are an error."""
    known = {field.name for field in dataclasses.fields(cast(Any, cls))}
    check_names(f"field of {cls.__name__}", record, known)
    return cls(**{key: _tuples(value) for key, value in record.items()})


def protocol_of(config: object) -> Record:
    """The part of a config that must be the same for all rows of a folder: all fields except GRID ones."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    grid = {field.name for field in dataclasses.fields(config) if field.metadata.get("grid")}
    return {key: value for key, value in to_record(config).items() if key not in grid}


def dumps(value: object) -> str:
    """JSON on one line. NaN and infinities become the strings "nan", "inf" and "-inf", which JSON lacks as numbers."""
    return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def number(value: object) -> float:
    """A number of a row as a float, where non-finite numbers are strings and ``None`` is NaN."""
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
