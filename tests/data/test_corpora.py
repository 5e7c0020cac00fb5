"""The corpora of the CPU protocol, byte for byte."""

from __future__ import annotations

import os
import tarfile

import numpy as np
import pytest

from efla.data import corpora

needs_data = pytest.mark.skipif(not os.environ.get("EFLA_DATA"), reason="EFLA_DATA names no folder with the corpora")

# name: bytes of train, validation and test, bytes that start documents included.
SIZES = {
    "shakespeare": (1_003_854, 55_770, 55_770),
    "novels": (66_115_828 + 90, 4_831_559 + 4, 5_239_369 + 4),
    "enwik8": (90_000_000, 5_000_000, 5_000_000),
}


@needs_data
@pytest.mark.parametrize("name", SIZES)
def test_splits_have_the_sizes_of_the_protocol(name):
    try:
        corpus = corpora.load(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == SIZES[name]


@needs_data
def test_books_are_normalised_and_start_with_the_bos_token():
    try:
        corpus = corpora.load("novels")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for part, books in (("train", 90), ("validation", 4), ("test", 4)):
        text = getattr(corpus, part)
        assert text[0] == corpora.BOS_TOKEN
        assert int((text == corpora.BOS_TOKEN).sum()) == books
        assert b"\r\n" not in text.tobytes()
        assert "﻿" not in text.tobytes().decode()
    # The four validation books in the order of their names begin with Braddon and end with Thackeray.
    first, *_, last = corpus.validation.tobytes().decode().split("\0")[1:]
    assert "Audley" in first[:20_000]
    assert "Pendennis" in last[:20_000]


def test_python_documentation_needs_no_file():
    corpus = corpora.load("python-docs")
    assert len(corpus.train) > 300_000
    whole = np.concatenate([corpus.train, corpus.validation, corpus.test])
    assert whole[0] == corpora.BOS_TOKEN
    assert "while_stmt" in whole.tobytes().decode()


def test_without_a_folder_the_error_names_the_file_and_the_options(monkeypatch):
    monkeypatch.delenv("EFLA_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"english_novels_98\.tar\.xz; set EFLA_DATA to its folder, or use --data-root"
    ):
        corpora.load("novels")


def test_a_wrong_folder_or_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no enwik8\.xz for the corpus 'enwik8' in"):
        corpora.load("enwik8", tmp_path)
    (tmp_path / "tinyshakespeare_input.txt").write_bytes(b"too short")
    with pytest.raises(ValueError, match="has 9 bytes of text, expected 1115394"):
        corpora.load("shakespeare", tmp_path)
    (tmp_path / "enwik8.xz").write_bytes(b"not xz")
    with pytest.raises(ValueError, match=r"enwik8\.xz is damaged"):
        corpora.load("enwik8", tmp_path)
    with tarfile.open(tmp_path / "english_novels_98.tar.xz", "w:xz"):
        pass
    with pytest.raises(ValueError, match="expected 98 books, found 0"):
        corpora.load("novels", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'novels'"):
        corpora.load("novel", tmp_path)
