"""Documents of a data set of the Hugging Face hub, streamed; only where one is named.

hf:owner/name            the split "train" of the default configuration
hf:owner/name:config     another configuration
hf:owner/name@split      another split
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PREFIX = "hf:"


def is_hub_name(source: str) -> bool:
    return source.startswith(PREFIX)


def read_documents(source: str, column: str = "text", skip: int = 0) -> Iterator[str]:
    """The documents in the data set's own order, without the first ``skip``."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise RuntimeError(f"reading {source} needs the package datasets: pip install 'efla[train]'") from None
    name, _, split = source.removeprefix(PREFIX).partition("@")
    name, _, config = name.partition(":")
    rows: Any = load_dataset(name, config or None, split=split or "train", streaming=True)
    for row in rows.skip(skip) if skip else rows:
        if not isinstance(row.get(column), str):
            raise ValueError(f"{source}: no text under {column!r} (found: {', '.join(row)}); name it with --column")
        yield row[column]
