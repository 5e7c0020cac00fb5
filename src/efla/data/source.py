"""What ``--data`` names, as training and validation tokens: a corpus, a prepared folder, or text that is prepared first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from efla.data import corpora, hub
from efla.data.prepare import PrepareConfig, Watcher, prepare
from efla.data.shards import is_prepared, open_shards, read_index
from efla.data.streams import TokenStream

Kind = Literal["corpus", "prepared", "text"]


@dataclass(frozen=True)
class TextData:
    """Tokens to train on and to validate with. border: the token that starts a document; digest: of all tokens."""

    name: str
    train: TokenStream
    validation: TokenStream
    tokenizer: str
    vocab_size: int
    border: int
    digest: str


def kind_of(data: str) -> Kind:
    """What a name stands for: one of the corpora, a folder of efla prepare, or text to be prepared."""
    if data in corpora.names():
        return "corpus"
    if is_prepared(Path(data)):
        return "prepared"
    if hub.is_hub_name(data) or Path(data).exists():
        return "text"
    raise FileNotFoundError(
        f"--data {data!r} is neither a corpus ({', '.join(corpora.names())}), a folder of efla prepare, a file or folder of "
        "text, nor hf:owner/name"
    )


def prepared_folder(
    data: str,
    tokenizer: str,
    folder: Path,
    *,
    max_tokens: int = 0,
    watch: Watcher | None = None,
    workers: int = 1,
) -> Path:
    """Where the tokens of ``data`` are: itself if it is prepared, else prepared into ``folder`` (once).

    max_tokens: of a data set of the hub no more than this is read; local text is read whole.
    """
    if kind_of(data) == "prepared":
        return Path(data)
    limit = max_tokens if hub.is_hub_name(data) else 0
    config = PrepareConfig(sources=(data,), tokenizer=tokenizer, max_tokens=limit)
    prepare(config, folder, workers=workers, watch=watch)
    return folder


def open_data(
    data: str,
    *,
    root: str | None = None,
    folder: Path | None = None,
    verify: bool = True,
    progress: Callable[[str], None] | None = None,
) -> TextData:
    """The tokens of a corpus (its file looked for in ``root``), or of the prepared ``folder`` (default: ``data`` itself)."""
    if kind_of(data) == "corpus":
        corpus = corpora.load(data, root)
        return TextData(
            name=data,
            train=corpus.stream("train"),
            validation=corpus.stream("validation"),
            tokenizer="bytes",
            vocab_size=corpora.VOCABULARY,
            border=corpora.BORDER,
            digest=corpus.digest,
        )
    index, train, validation = open_shards(folder or Path(data), verify=verify, progress=progress)
    return TextData(data, train, validation, index.tokenizer, index.vocab_size, index.border, index.digest)


def vocabulary_of(data: str, tokenizer: str) -> int:
    """How many different tokens ``data`` has or will have, without reading it."""
    from efla.data.tokenizers import load_tokenizer

    kind = kind_of(data)
    if kind == "corpus":
        return corpora.VOCABULARY
    return read_index(Path(data)).vocab_size if kind == "prepared" else load_tokenizer(tokenizer).vocab_size
