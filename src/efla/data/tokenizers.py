"""Text to token ids: bytes, the paper's Mistral tokenizer, or any tokenizer that transformers loads."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from efla.errors import import_optional

MISTRAL_PIECES = 32_000


class TextTokenizer(Protocol):
    """Turns documents into ids. Every document starts with ``bos_token``, which occurs nowhere else."""

    name: str
    vocab_size: int
    bos_token: int

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The ids of each text, starting with ``bos_token``, as :func:`token_type`."""

    def decode(self, ids: list[int]) -> str:
        """The text of some ids."""

    def save(self, folder: Path) -> None:
        """Write what ``efla generate`` and transformers need to use the tokenizer."""


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that holds every id."""
    return np.dtype("u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


def load_tokenizer(name: str) -> TextTokenizer:
    """Load "bytes", "mistral" (version 1, the paper's), or a folder, file or hub name that transformers loads."""
    if name == "bytes":
        return ByteDocuments()
    if name == "mistral":
        return MistralTokenizer()
    return TransformersTokenizer(name)


class ByteDocuments:
    """The tokens of :class:`efla.models.tokenizer.ByteTokenizer` as arrays, without importing transformers.

    Byte 0 starts a document; one inside a text is left out.
    """

    name = "bytes"
    vocab_size = 256
    bos_token = 0

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(b"\0" + text.encode("utf-8", "replace").replace(b"\0", b""), np.uint8) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        from efla.models.tokenizer import ByteTokenizer

        ByteTokenizer().save_pretrained(folder)


class MistralTokenizer:
    """The SentencePiece model of Mistral-7B-v0.1, from the package mistral-common: 32,000 pieces, bos 1, no eos added."""

    name = "mistral"
    vocab_size = MISTRAL_PIECES
    bos_token = 1

    def __init__(self) -> None:
        sentencepiece = import_optional("sentencepiece", _MISTRAL_MISSING)
        self.model = _mistral_file().read_bytes()
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        if self.processor.vocab_size() != MISTRAL_PIECES or self.processor.bos_id() != self.bos_token:
            raise ValueError(
                f"{_mistral_file()} has {self.processor.vocab_size()} pieces and bos {self.processor.bos_id()}; "
                f"expected {MISTRAL_PIECES} and {self.bos_token}"
            )

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        kind = token_type(self.vocab_size)
        encoded = self.processor.encode(list(texts), add_bos=True, add_eos=False, num_threads=1)
        return [np.asarray(ids, dtype=kind) for ids in encoded]

    def decode(self, ids: list[int]) -> str:
        return str(self.processor.decode(ids))

    def save(self, folder: Path) -> None:
        """Write a tokenizer.json for transformers, with merges in the order of the SentencePiece scores.

        transformers' own conversion of the SentencePiece file uses another order, which gives other tokens for runs
        of spaces.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
        from transformers import PreTrainedTokenizerFast

        pieces = [self.processor.id_to_piece(n) for n in range(self.vocab_size)]
        ids = {piece: n for n, piece in enumerate(pieces)}
        merges: list[tuple[float, int, int, int, tuple[str, str]]] = []
        for n, piece in enumerate(pieces):
            score, is_run = -self.processor.get_score(n), not piece.strip("▁")
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                # All runs of spaces have the same score; SentencePiece extends the leftmost run first.
                if left in ids and right in ids:
                    merges.append((score, -cut if is_run else 0, ids[left], ids[right], (left, right)))
        ordered = [pair for *_, pair in sorted(merges)]
        inner = Tokenizer(models.BPE(vocab=ids, merges=ordered, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", self.bos_token)]
        )
        inner.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)


class TransformersTokenizer:
    """Any tokenizer of transformers or tokenizers: a folder, a tokenizer.json, or a name on the Hugging Face hub.

    A document starts with the bos token, or with the eos token if there is no bos token.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.name = name
        try:
            if name.endswith(".json"):
                self.inner: Any = PreTrainedTokenizerFast(tokenizer_file=name)
            else:
                self.inner = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot load the tokenizer {name!r}: {error}. Expected bytes, mistral, a folder or tokenizer.json, "
                "or a name on the Hugging Face hub"
            ) from error
        known = map(self.inner.get_vocab().get, ("<s>", "<bos>", "<|endoftext|>", "</s>"))
        candidates = (self.inner.bos_token_id, self.inner.eos_token_id, *known)
        bos_token = next((token for token in candidates if token is not None), None)
        if bos_token is None:
            raise ValueError(
                f"the tokenizer {name!r} has neither a bos nor an eos token to start documents with; add one to it"
            )
        self.bos_token = int(bos_token)
        self.vocab_size = len(self.inner)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        kind = token_type(self.vocab_size)
        encoded = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray([self.bos_token, *ids], dtype=kind) for ids in encoded["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids))

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(folder)


_MISTRAL_MISSING = (
    "the Mistral tokenizer comes with the packages mistral-common and sentencepiece: pip install 'efla[tokenizers]'"
)


def _mistral_file() -> Path:
    """The file in the installed package. The package is not imported, because that loads much more than is needed."""
    found = importlib.util.find_spec("mistral_common")
    for place in (found.submodule_search_locations or []) if found is not None else []:
        file = Path(place) / "data" / "tokenizer.model.v1"
        if file.is_file():
            return file
    raise RuntimeError(_MISTRAL_MISSING)
