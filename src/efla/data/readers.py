"""Documents of local files (text, JSON lines, Parquet, tar archives, compressed or not) and of the Hugging Face hub.

Nothing is unpacked to disk: archives and compressed files are read as streams.
"""

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from efla.data.files import COMPRESSED, decompress, json_lines, named_damage
from efla.errors import import_optional

HUB = "hf:"
KINDS = {
    "text": (".txt", ".text", ".md", ".rst"),
    "lines": (".jsonl", ".ndjson", ".json"),
    "table": (".parquet",),
    "tar": (".tar", ".tgz", ".txz"),
}
_KNOWN = f"{', '.join(sum(KINDS.values(), ()))}, with or without {', '.join(COMPRESSED)}"


def list_files(paths: Iterable[Path]) -> list[Path]:
    """The files to read, in the order given; files of a folder are sorted by path.

    A file given by name must be of a known kind. In folders, other files are ignored.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and file_kind(file.name) is not None)
            if not found:
                raise FileNotFoundError(f"no text in {path}: expected files ending in {_KNOWN}")
            files += found
        elif not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")
        elif file_kind(path.name) is None:
            raise ValueError(f"{path}: cannot tell its kind from its name; expected one ending in {_KNOWN}")
        else:
            files.append(path)
    return files


def file_kind(name: str) -> str | None:
    """The kind of a file by its suffix: "text", "lines", "table", "tar", or ``None`` if unknown."""
    plain = name[: name.rindex(".")] if name.lower().endswith(COMPRESSED) else name
    suffix = Path(plain).suffix.lower()
    return next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), None)


def read_documents(file: Path, column: str = "text") -> Iterator[str]:
    """The documents of a file in order: a text file is one document; so is each line of JSON and each row of a table.

    column: the key or column that holds the text.
    """
    with named_damage(file), open(file, "rb") as stream:
        yield from _documents(str(file), file.name, stream, column)


def is_hub_name(source: str) -> bool:
    return source.startswith(HUB)


def read_hub(source: str, column: str = "text", skip: int = 0) -> Iterator[str]:
    """The documents of a data set on the Hugging Face hub, streamed in its own order, without the first ``skip``.

    hf:owner/name            the split "train" of the default configuration
    hf:owner/name:config     another configuration
    hf:owner/name@split      another split
    """
    datasets = import_optional("datasets", f"reading {source} needs the package datasets: pip install 'efla[train]'")
    name, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    for row in rows.skip(skip) if skip else rows:
        yield _text_of(row, column, source)


def _documents(label: str, name: str, stream: IO[bytes], column: str) -> Iterator[str]:
    kind = file_kind(name)
    with decompress(name, stream) as plain:
        if kind == "text":
            try:
                yield plain.read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"{label} is not UTF-8 (byte {error.start}); convert it first") from None
        elif kind == "lines":
            for line, row in json_lines(label, plain):
                yield _text_of(row, column, line)
        elif kind == "table":
            yield from _table(label, plain, column)
        else:
            with tarfile.open(fileobj=plain, mode="r|*") as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() and file_kind(member.name) else None
                    if content is not None:
                        yield from _documents(f"{label}: {member.name}", member.name, content, column)


def _text_of(row: Any, column: str, label: str) -> str:
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{label}: no text under {column!r} (found: {keys}); name it with --column")
    return text


def _table(label: str, stream: IO[bytes], column: str) -> Iterator[str]:
    parquet = import_optional("pyarrow.parquet", "reading Parquet needs pyarrow: pip install 'efla[train]'")
    # Members of an archive that is read as a stream cannot seek, and fail when asked whether they can.
    can_seek = not isinstance(stream, tarfile.ExFileObject) and stream.seekable()
    source = stream if can_seek else io.BytesIO(stream.read())
    table = parquet.ParquetFile(source)
    if column not in table.schema_arrow.names:
        raise ValueError(
            f"{label}: no column {column!r} (found: {', '.join(table.schema_arrow.names)}); name it with --column"
        )
    for batch in table.iter_batches(columns=[column]):
        yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)
