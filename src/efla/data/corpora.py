"""The byte corpora of the CPU experiments with their fixed splits, and one that comes with every Python.

Tokens are bytes: a vocabulary of 256, where byte 0 starts each document.
"""

import hashlib
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from efla.data.files import data_folder, find_file, named_damage, read_unpacked
from efla.data.sampling import TokenStream
from efla.errors import check_names

BOS_TOKEN = 0
VOCABULARY = 256

Bytes = NDArray[np.uint8]

_NOVELS = 98
_NOVELS_HELD_OUT = {"validation": (10, 35, 60, 85), "test": (20, 45, 70, 95)}
_NOVELS_SIZES = {"train": 66_115_828, "validation": 4_831_559, "test": 5_239_369}


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, each bytes [n]. source: the name of its file; digest: of all three parts."""

    name: str
    train: Bytes
    validation: Bytes
    test: Bytes
    source: str

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.tobytes())
        return digest.hexdigest()[:16]

    def stream(self, part: str = "train") -> TokenStream:
        """One of the parts "train", "validation" and "test"."""
        check_names("part of a corpus", [part], ["train", "validation", "test"])
        return TokenStream(getattr(self, part))


def names() -> list[str]:
    """Names of all corpora."""
    return ["python-docs", *_FILES]


def load(name: str, folder: str | Path | None = None) -> Corpus:
    """The corpus of that name, read from its file in ``folder`` or EFLA_DATA, there or in the subfolder ``corpus``."""
    if name == "python-docs":
        return _python_docs()
    check_names("corpus", [name], names())
    return _load_file(name, find(name, folder))


def find(name: str, folder: str | Path | None = None) -> Path:
    """The file of a corpus, packed or not."""
    file = _FILES[name][0]
    advice = "set EFLA_DATA to its folder, or use --data-root of efla train or --data of efla reproduce"
    root = data_folder(folder, option="--data or --data-root", expected=f"the folder of {file}")
    if root is None:
        raise FileNotFoundError(
            f"the corpus {name!r} is read from the file {file}; {advice} (the corpus python-docs needs no file)"
        )
    found = find_in(name, root)
    if found is None:
        raise FileNotFoundError(f"no {file} for the corpus {name!r} in {root} or {root / 'corpus'}; {advice}")
    return found


def find_in(name: str, folder: Path) -> Path | None:
    """The file of a corpus in a folder or its subfolder ``corpus``."""
    file = _FILES[name][0]
    return find_file((folder, folder / "corpus"), file, file.removesuffix(".xz"))


@cache
def _load_file(name: str, file: Path) -> Corpus:
    with named_damage(file):
        train, validation, test = _FILES[name][1](file)
    return Corpus(name, train, validation, test, file.name)


@cache
def _python_docs() -> Corpus:
    """Python's language reference, part of every interpreter: topics sorted by name, each after a byte 0.

    The first 90 % are for training, then 5 % each for validation and test.
    """
    from pydoc_data.topics import topics

    text = b"".join(b"\0" + topics[key].replace("\0", "").encode() for key in sorted(topics))
    data = np.frombuffer(text, dtype=np.uint8)
    held_out = len(data) // 20
    train, validation, test = np.split(data, [len(data) - 2 * held_out, len(data) - held_out])
    return Corpus("python-docs", train, validation, test, "pydoc_data.topics")


def _novels(file: Path) -> list[Bytes]:
    """98 books sorted by file name: no byte-order marks, lines end with LF, byte 0 before each book."""
    with tarfile.open(file) as archive:
        books = {}
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                books[member.name] = content.read().decode("utf-8-sig").replace("\r\n", "\n").encode()
    if len(books) != _NOVELS:
        raise ValueError(f"{file}: expected {_NOVELS} books, found {len(books)}; this is not the corpus")
    parts: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    where = {number: part for part, numbers in _NOVELS_HELD_OUT.items() for number in numbers}
    for number, name in enumerate(sorted(books)):
        parts[where.get(number, "train")].append(books[name])
    for part, texts in parts.items():
        found = sum(map(len, texts))
        if found != _NOVELS_SIZES[part]:
            raise ValueError(
                f"{file}: the {part} books have {found} bytes, expected {_NOVELS_SIZES[part]}; this is not the corpus"
            )
    return [np.frombuffer(b"".join(b"\0" + text for text in texts), dtype=np.uint8) for texts in parts.values()]


def _cut(sizes: tuple[int, int, int], file: Path) -> list[Bytes]:
    data = read_unpacked(file)
    if len(data) != sum(sizes):
        raise ValueError(f"{file} has {len(data)} bytes of text, expected {sum(sizes)}; this is not the corpus")
    return np.split(np.frombuffer(data, dtype=np.uint8), [sizes[0], sizes[0] + sizes[1]])


# Corpus -> its file, and how to read the parts train, validation and test from it.
_FILES: dict[str, tuple[str, Callable[[Path], list[Bytes]]]] = {
    "shakespeare": ("tinyshakespeare_input.txt", partial(_cut, (1_003_854, 55_770, 55_770))),
    "novels": ("english_novels_98.tar.xz", _novels),
    "enwik8": ("enwik8.xz", partial(_cut, (90_000_000, 5_000_000, 5_000_000))),
}
