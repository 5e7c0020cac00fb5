"""Tokenize text into shards, in parallel. Shards are identical for any number of workers, and killed runs resume.

Documents are read in order, sent to workers in pieces, and written in order. A shard is written under a temporary name,
synced and renamed; then ``progress.json`` records how many documents are done, and the next start skips those.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from efla.data.readers import is_hub_name, list_files, read_documents, read_hub
from efla.data.shards import INDEX, Index, Shard, is_prepared, read_index
from efla.data.tokenizers import TextTokenizer, load_tokenizer, token_type
from efla.runs.folder import lock_folder, require_same
from efla.runs.records import Count, Minimum, check_fields
from efla.runs.rows import explain_write, write_atomically

T = TypeVar("T")
R = TypeVar("R")

PROGRESS = "progress.json"
SOURCE_BYTES = "source_bytes"
_PARTS = ("train", "validation")
_UNFINISHED = ".bin.tmp"
_PIECE_CHARACTERS = 1 << 20
_PIECE_DOCUMENTS = 2000


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to tokenise and how; the tokens depend on nothing else."""

    sources: tuple[str, ...]
    """Files and folders of text (.txt, .jsonl, .parquet, .tar; .gz, .xz, .zst, .bz2), or hf:owner/name[:config][@split] for a
    data set of the Hugging Face hub, which is streamed."""
    tokenizer: str = "bytes"
    """bytes; mistral (the paper's); or a folder, tokenizer.json or hub name that transformers loads."""
    column: str = "text"
    """Key of JSON lines, or column of a table, that holds the text."""
    validation_share: float = 0.005
    """Share of the documents for validation, evenly spaced; if that is less than one document, of the tokens at the end."""
    shard_tokens: Count = 1 << 26
    """Tokens of a shard, which ends with the document that reaches them; a kill loses at most the shards being written."""
    max_tokens: Annotated[int, Minimum(0)] = 0
    """Stop after this many training tokens (0: read everything)."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("name at least one file, folder or hf:owner/name to prepare")
        if not 0 <= self.validation_share < 0.5:
            raise ValueError(f"validation_share must be at least 0 and below 0.5, got {self.validation_share}")
        check_fields(self)


class Watcher(Protocol):
    """Called with the progress so far."""

    def __call__(self, *, documents: int, tokens: int, text_bytes: int) -> None: ...


class _Piece(NamedTuple):
    """Encoded documents: all ids, the bytes of text, and each document's tokens and dropped characters."""

    ids: NDArray[Any]
    lengths: list[int]
    bytes: int
    dropped: list[int]


def prepare(config: PrepareConfig, output: Path, *, workers: int | None = None, watch: Watcher | None = None) -> Index:
    """Tokenize the sources into ``output`` and return its index; resumes an earlier call.

    A finished folder with the same settings is left unchanged; one with other settings is refused.
    workers: tokenizing processes (default: one per core, and none besides this one for bytes).
    """
    if workers is None:
        workers = 1 if config.tokenizer == "bytes" else os.cpu_count() or 1
    settings = json.loads(json.dumps(asdict(config)))
    if is_prepared(output):
        index = read_index(output)
        with contextlib.suppress(FileNotFoundError):  # the sources are no longer needed
            settings[SOURCE_BYTES] = _source_bytes(config)
        _check_settings(output, index.settings, settings)
        return index
    settings[SOURCE_BYTES] = _source_bytes(config)
    tokenizer = _tokenizer(config.tokenizer)
    with lock_folder(output):
        try:
            writer = _Writer(output, tokenizer, config, settings)
            documents = _documents(config, skip=writer.documents)
            text_bytes = 0
            for piece in _encode(documents, config.tokenizer, workers):
                writer.write(piece)
                text_bytes += piece.bytes
                if watch is not None:
                    watch(documents=writer.documents, tokens=sum(writer.tokens.values()), text_bytes=text_bytes)
                if writer.is_full:
                    break
            return writer.finish()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
                raise explain_write(error, output) from error
            raise


class _Writer:
    """Cuts encoded documents into shards, in order, after the shards and documents that are safely on disk."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, config: PrepareConfig, settings: dict[str, Any]) -> None:
        self.folder, self.tokenizer, self.config, self.settings = folder, tokenizer, config, settings
        done = _read_progress(folder, settings)
        self.documents, self.dropped = done["documents"], done["dropped"]
        self.shards = {part: [Shard(**shard) for shard in done[part]] for part in _PARTS}
        self.tokens = {part: sum(shard.tokens for shard in self.shards[part]) for part in _PARTS}
        self.open: dict[str, _OpenShard] = {}
        known = {shard.file for part in _PARTS for shard in self.shards[part]}
        # Shards that a kill left unfinished, or renamed but not recorded, are written again.
        for file in [*folder.glob("*.bin"), *folder.glob(f"*{_UNFINISHED}")]:
            if file.name not in known:
                file.unlink()
        self._record()  # before the first shard, so that a shard without a record is known to be ours

    @property
    def is_full(self) -> bool:
        return 0 < self.config.max_tokens <= self.tokens["train"]

    def write(self, piece: _Piece) -> None:
        end = 0
        for length, dropped in zip(piece.lengths, piece.dropped, strict=True):
            if self.is_full:
                return
            end += length
            share = self.config.validation_share  # for validation is every (1 / share)-th document
            is_held_out = math.floor((self.documents + 1) * share) > math.floor(self.documents * share)
            part = "validation" if is_held_out else "train"
            if part not in self.open:
                self.open[part] = _OpenShard(self.folder, part, len(self.shards[part]))
            self.open[part].append(piece.ids[end - length : end])
            self.documents += 1
            self.dropped += dropped
            self.tokens[part] += length
            if part == "train" and self.open[part].tokens >= self.config.shard_tokens:
                self.commit()

    def commit(self) -> None:
        """Close the open shards and record the progress, from which a resumed run starts."""
        for part, shard in self.open.items():
            self.shards[part].append(shard.close())
        self.open = {}
        self._record()

    def _record(self) -> None:
        shards = {part: [asdict(shard) for shard in self.shards[part]] for part in _PARTS}
        record = {"settings": self.settings, "documents": self.documents, "dropped": self.dropped, **shards}
        write_atomically(self.folder / PROGRESS, json.dumps(record).encode())

    def finish(self) -> Index:
        self.commit()
        if self.tokens["train"] == 0:
            raise ValueError(f"no text in {', '.join(self.config.sources)}; nothing was prepared")
        has_validation = bool(self.shards["validation"])
        index = Index(
            tokenizer=self.tokenizer.name,
            vocab_size=self.tokenizer.vocab_size,
            bos_token=self.tokenizer.bos_token,
            settings=self.settings,
            train=tuple(self.shards["train"]),
            validation=tuple(self.shards["validation"]),
            tail=0 if has_validation else int(self.tokens["train"] * self.config.validation_share),
            dropped=self.dropped,
        )
        write_atomically(self.folder / INDEX, index.as_json().encode())
        (self.folder / PROGRESS).unlink()
        return index


class _OpenShard:
    """A shard being written, under a temporary name."""

    def __init__(self, folder: Path, part: str, number: int) -> None:
        self.file = folder / f"{part}-{number:05d}.bin"
        self.temporary = self.file.with_suffix(_UNFINISHED)
        self.stream = open(self.temporary, "wb")  # noqa: SIM115  (closed by close)
        self.digest = hashlib.sha256()
        self.tokens = self.documents = 0

    def append(self, ids: NDArray[Any]) -> None:
        data = ids.tobytes()
        self.stream.write(data)
        self.digest.update(data)
        self.tokens += len(ids)
        self.documents += 1

    def close(self) -> Shard:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        os.replace(self.temporary, self.file)
        return Shard(self.file.name, self.tokens, self.documents, self.digest.hexdigest())


def _source_bytes(config: PrepareConfig) -> int:
    """Size of all local files together, to detect changed sources."""
    local = [Path(source) for source in config.sources if not is_hub_name(source)]
    return sum(file.stat().st_size for file in list_files(local)) if local else 0


def _documents(config: PrepareConfig, skip: int) -> Iterator[str]:
    """All documents of all sources in order, without the first ``skip``."""
    files = {s: list_files([Path(s)]) for s in config.sources if not is_hub_name(s)}  # fails early if one is missing
    for source in config.sources:
        if source not in files:
            only = len(config.sources) == 1  # then the hub can skip documents without reading them
            texts = read_hub(source, config.column, skip if only else 0)
            skip = 0 if only else skip
        else:
            texts = (text for file in files[source] for text in read_documents(file, config.column))
        for text in texts:
            if skip:
                skip -= 1
            else:
                yield text


def _encode(documents: Iterable[str], tokenizer: str, workers: int) -> Iterator[_Piece]:
    """Encoded pieces in the order of the documents."""
    encode = partial(_encode_piece, tokenizer)
    if workers <= 1:
        yield from map(encode, _pieces(documents))
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker) as pool:
        yield from map_ahead(pool, encode, _pieces(documents), ahead=3 * workers)


def map_ahead(pool: Executor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """The results for all items in order; up to ``ahead`` of them are computed before they are asked for."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _pieces(documents: Iterable[str]) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for text in documents:
        texts.append(text)
        characters += len(text)
        if characters >= _PIECE_CHARACTERS or len(texts) >= _PIECE_DOCUMENTS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


_tokenizer = lru_cache(1)(load_tokenizer)


def _encode_piece(name: str, texts: list[str]) -> _Piece:
    tokenizer = _tokenizer(name)
    encoded = tokenizer.encode(texts)
    ids = np.concatenate(encoded) if encoded else np.empty(0, token_type(tokenizer.vocab_size))
    is_bytes = tokenizer.name == "bytes"
    dropped = [text.count("\0") if is_bytes else 0 for text in texts]
    size = len(ids) - len(texts) if is_bytes else sum(len(text.encode("utf-8", "replace")) for text in texts)
    return _Piece(ids, [len(one) for one in encoded], size, dropped)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _read_progress(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    file = folder / PROGRESS
    if not file.exists():
        if any(folder.glob("*.bin")):
            raise ValueError(f"{folder} holds shards but neither {INDEX} nor {PROGRESS}; choose another --output")
        return {"documents": 0, "dropped": 0, **{part: [] for part in _PARTS}}
    record: dict[str, Any] = json.loads(file.read_text())
    if record["documents"]:  # else nothing has been kept, and the settings may change
        _check_settings(folder, record["settings"], settings)
    return record


def _check_settings(folder: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    there = {SOURCE_BYTES: now.get(SOURCE_BYTES), **there}  # early folders do not have it
    known = {key: there.get(key) for key in now}
    require_same(known, now, f"{folder} was prepared with other settings or texts")
