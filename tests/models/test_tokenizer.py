"""The byte tokenizer: ids are bytes, it is saved with the model, and every command finds it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from efla.data.tokenizers import load_tokenizer
from efla.models.loading import load_config, load_model
from efla.models.tokenizer import ByteTokenizer, is_byte_tokenizer
from tests.models.tiny import tiny_model

TEXTS = ["", "plain text", "  aé漢b\n\tĀ ÿ ", "emoji 🙂", "a\x00b"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_bytes_of_the_text(text):
    tokenizer = ByteTokenizer()
    ids = list(text.encode())
    assert tokenizer.encode(text) == tokenizer(text)["input_ids"] == [0, *ids]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, *ids], skip_special_tokens=True) == text.replace("\x00", "")


def test_broken_characters_decode_to_replacements():
    ids = [65, 233, 66, 0xE6, 0xBC]
    assert ByteTokenizer().decode(ids) == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_documents_have_the_same_ids(text):
    documents = load_tokenizer("bytes")
    assert documents.encode([text])[0].tolist() == ByteTokenizer().encode(text)
    assert documents.decode([0, *text.encode()]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_the_saved_tokenizer_loads_without_efla(text, tmp_path):
    load_tokenizer("bytes").save(tmp_path)
    expected = ByteTokenizer().encode(text)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == expected
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(text) == expected
    assert set(loaded(text)) == {"input_ids", "attention_mask"}
    assert loaded.bos_token_id == loaded.eos_token_id == loaded.pad_token_id == 0
    assert is_byte_tokenizer(loaded)


def test_a_training_run_is_found_with_and_without_tokenizer_files(tmp_path):
    tiny_model(vocab_size=256).save_pretrained(tmp_path / "run/model")
    (tmp_path / "run/config.json").write_text('{"steps": 10}')  # the training's, not the model's
    without = load_model(str(tmp_path / "run"))
    ByteTokenizer().save_pretrained(tmp_path / "run/model")
    for loaded in (without, load_model(str(tmp_path / "run")), load_model(str(tmp_path / "run/model"))):
        assert type(loaded.tokenizer) is ByteTokenizer
        assert loaded.facts["tokens"] == "bytes"
        assert loaded.digest == without.digest
    assert load_config(str(tmp_path / "run")).vocab_size == 256
