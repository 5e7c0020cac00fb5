"""Prepared tokens on disk: flat files of little-endian ids that are mapped into memory, and an index with checksums.

    index.json         what they are: tokenizer, type, border token, and for each shard its tokens, documents and SHA-256
    train-00000.bin    documents end to end, each led by the border token; a shard ends with a document
    validation-00000.bin

A folder is complete when it has ``index.json``, which is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efla.data.streams import Tokens, TokenStream
from efla.data.tokenizers import token_type

INDEX = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One file: how many tokens and documents it holds, and its SHA-256."""

    file: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What a prepared folder holds.

    tail: tokens at the end of the training shards that are kept for validation. dropped: characters left out because
    the tokenizer has no token for them (byte 0 in byte mode).
    """

    tokenizer: str
    vocab_size: int
    border: int
    settings: dict[str, Any]
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    tail: int = 0
    dropped: int = 0

    def as_json(self) -> str:
        totals = {
            part: {
                "tokens": sum(shard.tokens for shard in shards),
                "documents": sum(shard.documents for shard in shards),
            }
            for part, shards in (("train", self.train), ("validation", self.validation))
        }
        return json.dumps({"format": FORMAT, "totals": totals, **asdict(self)}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """Of all shards' checksums, in order."""
        sums = "".join(shard.sha256 for shard in (*self.train, *self.validation))
        return hashlib.sha256(f"{sums}{self.tail}".encode()).hexdigest()[:16]


def is_prepared(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> Index:
    """The index of a prepared folder; says what is wrong with one that is not."""
    file = folder / INDEX
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {INDEX}; expected a folder written by efla prepare, which ends with it"
        )
    try:
        record = json.loads(file.read_text())
        if record.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        record.pop("totals", None)
        for part in ("train", "validation"):
            record[part] = tuple(Shard(**shard) for shard in record[part])
        return Index(**record)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not an index of efla prepare ({error}); prepare the text again") from error


def open_shards(
    folder: Path, *, verify: bool = True, progress: Callable[[str], None] | None = None
) -> tuple[Index, TokenStream, TokenStream]:
    """The index, and the training and validation tokens mapped into memory.

    Sizes are always checked; ``verify`` also reads every byte and compares checksums.
    """
    index = read_index(folder)
    kind = token_type(index.vocab_size)
    parts: dict[str, list[Tokens]] = {"train": [], "validation": []}
    for part, shards in (("train", index.train), ("validation", index.validation)):
        for shard in shards:
            file = folder / shard.file
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing, which {folder / INDEX} lists; prepare the text again")
            size = file.stat().st_size
            if size != shard.tokens * kind.itemsize:
                raise ValueError(
                    f"{file} has {size} bytes, expected {shard.tokens * kind.itemsize}; it is damaged, prepare the text again"
                )
            if verify:
                if progress is not None:
                    progress(shard.file)
                if checksum(file) != shard.sha256:
                    raise ValueError(f"{file} does not match its checksum; it is damaged, prepare the text again")
            parts[part].append(np.memmap(file, dtype=kind, mode="r"))
    train, validation = TokenStream(*parts["train"]), TokenStream(*parts["validation"])
    if index.tail:
        cut = len(train) - index.tail
        train, validation = train.slice(0, cut), train.slice(cut, len(train))
    return index, train, validation


def checksum(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(stream)


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    while piece := stream.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
