"""Text in and out of a model: its tokenizer where it has one, bytes where its vocabulary is bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from efla.models.configuration_efla import EflaConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


class Codec(Protocol):
    """Turns text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteCodec:
    """Bytes are tokens: UTF-8, with the model's bos before the text. Broken characters decode to U+FFFD."""

    def __init__(self, bos_token_id: int | None = 0) -> None:
        self.bos = [] if bos_token_id is None else [bos_token_id]

    def encode(self, text: str) -> list[int]:
        return [*self.bos, *text.encode("utf-8")]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 0 < i < 256).decode("utf-8", errors="replace")


def load_codec(source: str, config: EflaConfig, tokenizer: str | None = None) -> Codec:
    """The named tokenizer, else the checkpoint's own, else bytes if the vocabulary has 256 words."""
    folder = Path(source)
    has_own = not folder.is_dir() or any((folder / name).is_file() for name in _TOKENIZER_FILES)
    if tokenizer is None and config.vocab_size == 256 and (folder.is_dir() and not has_own):
        return ByteCodec(config.bos_token_id)
    if tokenizer is None and not has_own:
        raise ValueError(
            f"{source} has no tokenizer and its vocabulary of {config.vocab_size} is not bytes; name one with --tokenizer"
        )
    return cast(Codec, AutoTokenizer.from_pretrained(tokenizer or source))


class TimedStreamer(BaseStreamer):  # type: ignore[misc]
    """Passes on text as its tokens come, and keeps the time of each.

    Text is passed on up to the last whole character; ``times`` holds one moment for the prompt and one for each token.
    """

    def __init__(self, codec: Codec, write: Callable[[str], Any]) -> None:
        self.codec = codec
        self.write = write
        self.times: list[float] = []
        self.ids: list[int] = []
        self.num_written = 0

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return  # the prompt
        self.ids += value.flatten().tolist()
        self._flush(final=False)

    def end(self) -> None:
        self._flush(final=True)

    def _flush(self, final: bool) -> None:
        text = self.codec.decode(self.ids)
        if not final:
            text = text.rstrip("�")  # the rest of the character is still to come
        self.write(text[self.num_written :])
        self.num_written = max(self.num_written, len(text))


def as_batch(ids: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([ids], dtype=torch.long, device=device)
