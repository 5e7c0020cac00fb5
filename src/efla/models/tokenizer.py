"""The byte tokenizer, for models whose vocabulary is the 256 bytes, and text streamed from generated tokens."""

import time
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

_BOUNDARY = "\x00"


def byte_vocabulary() -> dict[str, int]:
    """The token of each byte: the printable characters that tokenizers' ``ByteLevel`` writes for bytes, and byte 0 itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {_BOUNDARY if byte == 0 else characters[byte]: byte for byte in range(256)}


class ByteTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A token is a byte of UTF-8. Byte 0, which occurs in no text, is bos, eos and padding.

    ``encode`` puts bos first unless ``add_special_tokens=False``, as in training. ``save_pretrained`` writes a
    tokenizer.json that transformers and tokenizers load without efla.
    """

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("tokenizer_object") is None and kwargs.get("tokenizer_file") is None:
            kwargs["tokenizer_object"] = _byte_level_tokenizer()
        for name in ("bos_token", "eos_token", "pad_token"):
            kwargs.setdefault(name, _BOUNDARY)
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        kwargs.setdefault("model_input_names", ["input_ids", "attention_mask"])
        super().__init__(**kwargs)

    def encode(self, text: str, *args: Any, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        if args or kwargs:
            return super().encode(text, *args, add_special_tokens=add_special_tokens, **kwargs)
        # A hundred times faster than the general path.
        return [*([0] if add_special_tokens else []), *text.encode("utf-8")]


def _byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOUNDARY} $A", pair=f"{_BOUNDARY} $A $B", special_tokens=[(_BOUNDARY, 0)]
    )
    return tokenizer


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether a tokenizer's tokens are bytes, also when transformers loaded it as a class of its own."""
    return isinstance(tokenizer, ByteTokenizer) or (
        len(tokenizer) == 256 and tokenizer.get_vocab() == byte_vocabulary()
    )


class TimedStreamer:
    """A streamer for ``generate`` that passes on text as tokens arrive and keeps the time of each.

    Text is passed on up to the last whole character. ``times`` holds one moment for the prompt and one for each token.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.times: list[float] = []
        self.ids: list[int] = []
        self.num_written = 0
        self._skip_special = is_byte_tokenizer(tokenizer)

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return  # the prompt
        self.ids += value.flatten().tolist()
        self._flush(final=False)

    def end(self) -> None:
        self._flush(final=True)

    def _flush(self, final: bool) -> None:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=self._skip_special)
        if not final:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the rest of the character is still to come
        self.write(text[self.num_written :])
        self.num_written = max(self.num_written, len(text))
