"""Local data files: the folder they are in, and their content, unpacked."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

COMPRESSED = (".gz", ".xz", ".zst", ".bz2")


def data_folder(given: str | Path | None, *, option: str = "--data", expected: str = "") -> Path | None:
    """The folder given with ``option``, else the one in EFLA_DATA, else ``None``.

    A folder that does not exist is an error. expected: what should be in it, for the message.
    """
    folder = given or os.environ.get("EFLA_DATA")
    if not folder:
        return None
    if not Path(folder).is_dir():
        wanted = f"; expected {expected}" if expected else ""
        raise FileNotFoundError(f"{option if given else 'EFLA_DATA'} is {str(folder)!r}, which is not a folder{wanted}")
    return Path(folder)


def find_file(folders: Sequence[Path], *names: str) -> Path | None:
    """The first file of these names in any of the folders; all folders are searched for the first name first."""
    candidates = (folder / name for name in names for folder in folders)
    return next((file for file in candidates if file.is_file()), None)


def read_unpacked(file: Path) -> bytes:
    """The content of a file, decompressed as its name says."""
    with named_damage(file), open(file, "rb") as stream, decompress(file.name, stream) as plain:
        return plain.read()


def decompress(name: str, stream: IO[bytes]) -> IO[bytes]:
    """The decompressed content of a stream, by the suffix of its name; raises at the end of truncated data."""
    name = name.lower()
    if name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if name.endswith((".xz", ".txz")):
        return cast("IO[bytes]", lzma.LZMAFile(stream))
    if name.endswith(".bz2"):
        return cast("IO[bytes]", bz2.BZ2File(stream))
    if name.endswith(".zst"):
        return cast("IO[bytes]", _zstd().ZstdFile(stream))
    return stream


@contextmanager
def named_damage(file: Path) -> Iterator[None]:
    """Turn the errors of damaged archives into a ``ValueError`` that names the file."""
    try:
        yield
    except Exception as error:
        known = (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, UnicodeDecodeError)
        is_format_error = isinstance(error, OSError) and error.errno is None  # not the disk's
        if not (isinstance(error, known) or is_format_error or type(error).__name__ == "ZstdError"):
            raise
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error


def json_lines(label: str, lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """The values of lines of JSON, each with ``label`` and its line number for messages; empty lines are skipped."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{label}, line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{label}, line {number} is not JSON ({error}); expected an object on every line. The file may be damaged"
                ) from None


def checksum(file: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def file_damage(file: Path, size: int, sha256: str | None) -> str | None:
    """What is wrong with a file of known size and checksum (``None``: not compared), or ``None`` if nothing is."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != size:
        return f"{file.name} has {file.stat().st_size} bytes, expected {size}"
    if sha256 is not None and checksum(file) != sha256:
        return f"{file.name} does not match its checksum"
    return None


def _zstd() -> Any:
    for name in ("compression.zstd", "backports.zstd"):  # the first comes with Python 3.14
        with suppress(ImportError):
            return import_module(name)
    raise RuntimeError("reading .zst needs backports.zstd: pip install 'efla[train]'")
