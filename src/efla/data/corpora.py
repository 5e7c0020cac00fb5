"""The texts of the CPU protocol as bytes, with their exact splits (spec lm.md 7.1), and one that every Python has.

Bytes are tokens: a vocabulary of 256, byte 0 as bos and document border.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from efla.data.streams import TokenStream
from efla.errors import unknown_name

BORDER = 0
VOCABULARY = 256

Bytes = NDArray[np.uint8]

_NOVELS = 98
_NOVELS_HELD_OUT = {"validation": (10, 35, 60, 85), "test": (20, 45, 70, 95)}
_NOVELS_SIZES = {"train": 66_115_828, "validation": 4_831_559, "test": 5_239_369}


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, each bytes [n]. source: where it came from; digest: of all three parts."""

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
        if part not in ("train", "validation", "test"):
            raise unknown_name("part of a corpus", part, ["train", "validation", "test"])
        return TokenStream(getattr(self, part))


def names() -> list[str]:
    """Names of all corpora."""
    return ["python-docs", *_FILES]


def load(name: str, folder: str | Path | None = None) -> Corpus:
    """The corpus of that name. Its file is looked for in ``folder`` or the folder in EFLA_DATA, there or in ``corpus``."""
    if name == "python-docs":
        return _python_docs()
    if name not in _FILES:
        raise unknown_name("corpus", name, names())
    return _load_file(name, str(find(name, folder)))


def find(name: str, folder: str | Path | None = None) -> Path:
    """The file of a corpus, as it is or unpacked."""
    file = _FILES[name][0]
    root = folder or os.environ.get("EFLA_DATA")
    if not root:
        raise FileNotFoundError(
            f"the corpus {name!r} is read from the file {file}; name its folder with EFLA_DATA, or --data-root "
            "of efla train, --data of efla reproduce (the corpus python-docs needs no file)"
        )
    candidates = [Path(root) / sub / kind for kind in (file, file.removesuffix(".xz")) for sub in ("", "corpus")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"no {file} in {root} (nor in its folder corpus), which the corpus {name!r} is read from; "
        "name the right folder with EFLA_DATA, or --data-root of efla train, --data of efla reproduce"
    )


@cache
def _load_file(name: str, file: str) -> Corpus:
    read = _FILES[name][1]
    try:
        train, validation, test = read(Path(file))
    except (lzma.LZMAError, tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    return Corpus(name, train, validation, test, Path(file).name)


@cache
def _python_docs() -> Corpus:
    """Python's own language reference, which comes with every interpreter: chapters by name, byte 0 before each.

    Nine tenths to train on, a twentieth each for validation and test.
    """
    from pydoc_data.topics import topics

    text = b"".join(b"\0" + topics[key].replace("\0", "").encode() for key in sorted(topics))
    data = np.frombuffer(text, dtype=np.uint8)
    held_out = len(data) // 20
    first, second = len(data) - 2 * held_out, len(data) - held_out
    return Corpus("python-docs", data[:first], data[first:second], data[second:], "pydoc_data.topics")


def _shakespeare(file: Path) -> tuple[Bytes, Bytes, Bytes]:
    return _cut(file, _unpacked(file), (1_003_854, 55_770, 55_770))


def _enwik8(file: Path) -> tuple[Bytes, Bytes, Bytes]:
    return _cut(file, _unpacked(file), (90_000_000, 5_000_000, 5_000_000))


def _novels(file: Path) -> tuple[Bytes, Bytes, Bytes]:
    """98 books in the order of their file names; without byte-order mark, lines ended by LF, byte 0 before each."""
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
    joined = {
        part: np.frombuffer(b"".join(b"\0" + text for text in texts), dtype=np.uint8) for part, texts in parts.items()
    }
    return joined["train"], joined["validation"], joined["test"]


def _unpacked(file: Path) -> bytes:
    data = file.read_bytes()
    return lzma.decompress(data) if file.suffix == ".xz" else data


def _cut(file: Path, data: bytes, sizes: tuple[int, int, int]) -> tuple[Bytes, Bytes, Bytes]:
    if len(data) != sum(sizes):
        raise ValueError(f"{file} has {len(data)} bytes of text, expected {sum(sizes)}; this is not the corpus")
    array = np.frombuffer(data, dtype=np.uint8)
    first, second = sizes[0], sizes[0] + sizes[1]
    return array[:first], array[first:second], array[second:]


_FILES: dict[str, tuple[str, Callable[[Path], tuple[Bytes, Bytes, Bytes]]]] = {
    "shakespeare": ("tinyshakespeare_input.txt", _shakespeare),
    "novels": ("english_novels_98.tar.xz", _novels),
    "enwik8": ("enwik8.xz", _enwik8),
}
