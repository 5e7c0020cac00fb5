"""Prepared tokens on disk: flat files of little-endian ids, mapped into memory, and an index with checksums.

    index.json         tokenizer, vocabulary, and for each shard its number of tokens and documents and its SHA-256
    train-00000.bin    documents one after another, each starting with the bos token; shards hold whole documents
    validation-00000.bin

``index.json`` is written last: a folder that has it is complete.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efla.data.files import file_damage
from efla.data.sampling import Tokens, TokenStream
from efla.data.tokenizers import token_type

INDEX = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One file, its number of tokens and documents, and its SHA-256."""

    file: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The content of a prepared folder.

    bos_token: the token that starts every document ("border" in the file). tail: tokens at the end of the training
    shards that are used for validation. dropped: characters without a token (byte 0 in byte mode).
    """

    tokenizer: str
    vocab_size: int
    bos_token: int
    settings: dict[str, Any]
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    tail: int = 0
    dropped: int = 0

    def as_json(self) -> str:
        parts = {"train": self.train, "validation": self.validation}
        totals = {
            part: {name: sum(getattr(shard, name) for shard in shards) for name in ("tokens", "documents")}
            for part, shards in parts.items()
        }
        fields = {"border" if key == "bos_token" else key: value for key, value in asdict(self).items()}
        return json.dumps({"format": FORMAT, "totals": totals, **fields}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """A hash of all shards' checksums, in order."""
        sums = "".join(shard.sha256 for shard in (*self.train, *self.validation))
        return hashlib.sha256(f"{sums}{self.tail}".encode()).hexdigest()[:16]


def is_prepared(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> Index:
    """The index of a prepared folder."""
    file = folder / INDEX
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {INDEX}; expected a folder that efla prepare has finished")
    try:
        record = json.loads(file.read_text())
        if record.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        record.pop("totals", None)
        record["bos_token"] = record.pop("border")
        for part in ("train", "validation"):
            record[part] = tuple(Shard(**shard) for shard in record[part])
        return Index(**record)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not an index of efla prepare ({error}); prepare the text again") from error


def open_shards(folder: Path, *, verify: bool = True) -> tuple[Index, TokenStream, TokenStream]:
    """The index, and the training and validation tokens, mapped into memory.

    File sizes are always checked; ``verify`` also compares checksums.
    """
    index = read_index(folder)
    kind = token_type(index.vocab_size)
    parts: dict[str, list[Tokens]] = {"train": [], "validation": []}
    for part, shards in (("train", index.train), ("validation", index.validation)):
        for shard in shards:
            file = folder / shard.file
            problem = file_damage(file, shard.tokens * kind.itemsize, shard.sha256 if verify else None)
            if problem is not None:
                raise ValueError(f"{folder} is damaged: {problem}; prepare the text again")
            parts[part].append(np.memmap(file, dtype=kind, mode="r"))
    train, validation = TokenStream(*parts["train"]), TokenStream(*parts["validation"])
    if index.tail:
        cut = len(train) - index.tail
        train, validation = train.slice(0, cut), train.slice(cut, len(train))
    return index, train, validation
