"""Documents from local files: text, JSON lines, Parquet, tar archives of them, compressed or not, and folders.

Nothing is unpacked to disk: archives and compressed files are read as streams.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

TEXT = (".txt", ".text", ".md", ".rst")
LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet",)
ARCHIVES = (".tar", ".tgz", ".txz")
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")


def list_files(paths: Iterable[Path]) -> list[Path]:
    """The files to read, in a fixed order: as given, a folder's own files by their path within it.

    A file that is named must be of a known kind; in a folder others are passed over.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file.name) is not None)
            if not found:
                raise FileNotFoundError(f"no text in {path}: expected files ending in {_known()}")
            files += found
        elif not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")
        elif kind_of(path.name) is None:
            raise ValueError(f"{path}: cannot tell its kind from its name; expected one ending in {_known()}")
        else:
            files.append(path)
    return files


def kind_of(name: str) -> str | None:
    """What the end of a file's name says it holds: "text", "lines", "table", "tar" or nothing known."""
    suffix = Path(_uncompressed(name)).suffix.lower()
    for kind, suffixes in (("text", TEXT), ("lines", LINES), ("table", TABLES), ("tar", ARCHIVES)):
        if suffix in suffixes:
            return kind
    return None


def read_documents(file: Path, column: str = "text") -> Iterator[str]:
    """The documents of a file in order: a text file is one, a line of JSON or a row of a table is one each.

    column: the key or column that holds the text.
    """
    try:
        with open(file, "rb") as stream:
            yield from _documents(str(file), file.name, stream, column)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error


def _documents(label: str, name: str, stream: IO[bytes], column: str) -> Iterator[str]:
    kind = kind_of(name)
    with _decompress(name, stream) as plain:
        if kind == "text":
            yield _decode(label, plain.read())
        elif kind == "lines":
            yield from _lines(label, plain, column)
        elif kind == "table":
            yield from _table(label, plain, column)
        else:
            with tarfile.open(fileobj=plain, mode="r|*") as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() and kind_of(member.name) else None
                    if content is not None:
                        yield from _documents(f"{label}: {member.name}", member.name, content, column)


def _lines(label: str, stream: IO[bytes], column: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{label}, line {number}: not a JSON object ({error}); expected one on every line"
            ) from None
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{label}, line {number}: no text under {column!r} (found: {keys}); name it with --column")
        yield text


def _table(label: str, stream: IO[bytes], column: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise RuntimeError("reading Parquet needs pyarrow: pip install 'efla[train]'") from None
    # A member of an archive that is read as a stream cannot go back, and fails when asked whether it can.
    can_go_back = not isinstance(stream, tarfile.ExFileObject) and stream.seekable()
    source = stream if can_go_back else io.BytesIO(stream.read())
    table = parquet.ParquetFile(source)
    if column not in table.schema_arrow.names:
        raise ValueError(
            f"{label}: no column {column!r} (found: {', '.join(table.schema_arrow.names)}); name it with --column"
        )
    for batch in table.iter_batches(columns=[column]):
        for value in batch.column(0):
            text = value.as_py()
            if text is not None:
                yield str(text)


def _decode(label: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{label} is not UTF-8 (byte {error.start}); convert it first") from None


def _decompress(name: str, stream: IO[bytes]) -> IO[bytes]:
    name = name.lower()
    if name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if name.endswith((".xz", ".txz")):
        return cast("IO[bytes]", lzma.LZMAFile(stream))
    if name.endswith(".bz2"):
        return cast("IO[bytes]", bz2.BZ2File(stream))
    if name.endswith(".zst"):
        return io.BufferedReader(_ZstdFrames(stream))
    return stream


class _ZstdFrames(io.RawIOBase):
    """The content of zstd frames end to end; zstandard's own reader takes a file that was cut off for its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise RuntimeError("reading .zst needs zstandard: pip install 'efla[train]'") from None
        self._stream, self._decompressor, self._error = stream, zstandard.ZstdDecompressor(), zstandard.ZstdError
        self._frame: Any = None
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._stream.read(1 << 17)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the compressed data ends inside a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._plain = self._frame.decompress(self._packed)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count


def _uncompressed(name: str) -> str:
    return name[: name.rindex(".")] if name.lower().endswith(COMPRESSED) else name


def _known() -> str:
    return f"{', '.join((*TEXT, *LINES, *TABLES, *ARCHIVES))}, with or without {', '.join(COMPRESSED)}"
