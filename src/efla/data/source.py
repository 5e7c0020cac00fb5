"""Training and validation tokens of what ``--data`` names: a corpus, a prepared folder, or text to prepare first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from efla.data import corpora
from efla.data.readers import is_hub_name
from efla.data.sampling import TokenStream
from efla.data.shards import is_prepared, open_shards

Kind = Literal["corpus", "prepared", "text"]


@dataclass(frozen=True)
class TextData:
    """Tokens to train on and to validate with. bos_token: starts every document; digest: a hash of all tokens."""

    name: str
    train: TokenStream
    validation: TokenStream
    tokenizer: str
    vocab_size: int
    bos_token: int
    digest: str


def source_kind(data: str) -> Kind:
    """Whether a name is a corpus, a folder of efla prepare, or text to be prepared."""
    if data in corpora.names():
        return "corpus"
    if is_prepared(Path(data)):
        return "prepared"
    if is_hub_name(data) or Path(data).exists():
        return "text"
    raise FileNotFoundError(
        f"--data {data!r} is neither a corpus ({', '.join(corpora.names())}), a folder of efla prepare, a file or folder of "
        "text, nor hf:owner/name"
    )


def open_data(data: str, *, root: str | None = None, folder: Path | None = None, verify: bool = True) -> TextData:
    """The tokens of a corpus, whose file is in ``root``, or of a prepared ``folder`` (default: ``data`` itself)."""
    if source_kind(data) == "corpus":
        corpus = corpora.load(data, root)
        train, validation = corpus.stream("train"), corpus.stream("validation")
        return TextData(data, train, validation, "bytes", corpora.VOCABULARY, corpora.BOS_TOKEN, corpus.digest)
    index, train, validation = open_shards(folder or Path(data), verify=verify)
    return TextData(data, train, validation, index.tokenizer, index.vocab_size, index.bos_token, index.digest)
