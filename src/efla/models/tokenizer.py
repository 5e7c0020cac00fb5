"""Bytes as a transformers tokenizer, for models whose vocabulary is the 256 bytes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizer


class ByteTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """A token is a byte of UTF-8; byte 0, which occurs in no text, is bos, eos and padding.

    ``encode`` puts bos first unless ``add_special_tokens=False``, as documents are trained on.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        for name in ("bos_token", "eos_token", "pad_token"):
            kwargs.setdefault(name, "\x00")
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)}

    def encode(self, text: str, *args: Any, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        if args or kwargs:
            return super().encode(text, *args, add_special_tokens=add_special_tokens, **kwargs)
        return [*([0] if add_special_tokens else []), *text.encode("utf-8")]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0, *token_ids_0, *(token_ids_1 or [])]

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(ord(token) for token in tokens).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()
