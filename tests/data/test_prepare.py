"""Text to shards: every kind of file, any number of workers, killed at any moment."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import signal
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from efla import cli
from efla.data import prepare as preparing
from efla.data import readers
from efla.data.files import checksum
from efla.data.prepare import PrepareConfig, prepare
from efla.data.shards import INDEX, open_shards
from efla.data.source import open_data
from efla.data.tokenizers import ByteDocuments, load_tokenizer, token_type
from efla.runs.folder import lock_folder
from tests.fresh import run_fresh

TEXTS = ["First document.", "Zweites: äöü 漢字 🙂", "third\nwith lines\n", "", "x" * 300]
LINES = b"".join(json.dumps({"text": t, "id": n}).encode() + b"\n" for n, t in enumerate(TEXTS))


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def write_corpus(folder: Path, documents: int) -> Path:
    file = folder / "documents.jsonl"
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "lambda", "é"]
    with open(file, "w") as stream:
        for _ in range(documents):
            text = " ".join(rng.choice(words, size=int(rng.integers(1, 60))))
            stream.write(json.dumps({"text": text}) + "\n")
    return file


def shard_sums(folder: Path) -> dict[str, str]:
    return {file.name: checksum(file) for file in sorted(folder.glob("*.bin"))}


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.xz", lzma.compress), ("a.ndjson.bz2", bz2.compress)],
)
def test_json_lines_are_read_compressed_or_not(name, compress, tmp_path):
    (tmp_path / name).write_bytes(compress(LINES))
    assert list(readers.read_documents(tmp_path / name)) == TEXTS


def test_zstandard_frames_are_read(tmp_path):
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(LINES[:20]) + zstd.compress(LINES[20:]))
    assert list(readers.read_documents(tmp_path / "a.jsonl.zst")) == TEXTS
    whole = zstd.compress(b"some text " * 100_000)
    (tmp_path / "b.txt.zst").write_bytes(whole)
    assert list(readers.read_documents(tmp_path / "b.txt.zst")) == ["some text " * 100_000]
    for damaged in (whole[:-5], whole[:20] + b"\xff" * 8 + whole[28:], b"nonsense"):
        (tmp_path / "b.txt.zst").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"b\.txt\.zst is damaged"):
            list(readers.read_documents(tmp_path / "b.txt.zst"))


@pytest.mark.skipif(not has("pyarrow"), reason="pyarrow is not installed (extra train)")
def test_parquet_is_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS, "id": range(5)}), tmp_path / "a.parquet")
    assert list(readers.read_documents(tmp_path / "a.parquet", "body")) == TEXTS
    with pytest.raises(ValueError, match=r"no column 'text' \(found: body, id\); name it with --column"):
        list(readers.read_documents(tmp_path / "a.parquet"))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.parquet", "a.parquet")
    assert list(readers.read_documents(tmp_path / "a.tar", "body")) == TEXTS


@pytest.mark.parametrize("name", ["a.tar", "a.tar.xz", "a.tgz"])
def test_archives_are_read_member_by_member(name, tmp_path):
    mode = {"a.tar": "w", "a.tar.xz": "w:xz", "a.tgz": "w:gz"}[name]
    members = {"b/one.txt": b"\xef\xbb\xbfone", "c.jsonl.gz": gzip.compress(LINES), "picture.png": b"\x89PNG"}
    with tarfile.open(tmp_path / name, mode) as archive:
        for member, data in members.items():
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    assert list(readers.read_documents(tmp_path / name)) == ["one", *TEXTS]


def test_folders_are_read_in_the_order_of_their_paths(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.txt", "notes.docx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = readers.list_files([tmp_path])
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a/y.txt", "a/z.txt", "b.txt"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"no text under 'text' \(found: body\); name it with --column"),
        ("a.txt", b"\xff\xfe", r"a\.txt is not UTF-8 \(byte 0\)"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-12], "is damaged"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:12] + b"\xff" * 20, "is damaged"),
        ("a.jsonl.xz", b"nonsense", "is damaged"),
    ],
)
def test_bad_files_are_named(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(readers.read_documents(tmp_path / name))


def test_what_cannot_be_read_is_said_before_anything_is_written(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"")
    for source, message in ((tmp_path / "a.docx", "cannot tell its kind"), (tmp_path / "none", "no such file")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            prepare(PrepareConfig(sources=(str(source),)), tmp_path / "out")


def test_bytes_come_back_as_the_text_they_were(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    prepare(PrepareConfig(sources=(str(tmp_path / "a.jsonl"),), validation_share=0), tmp_path / "out")
    index, train, validation = open_shards(tmp_path / "out")
    assert train.read(0, len(train)).astype(np.uint8).tobytes().decode().split("\0")[1:] == TEXTS
    assert len(validation) == 0
    assert (index.vocab_size, index.bos_token, index.train[0].documents) == (256, 0, 5)


def test_few_documents_keep_their_end_for_validation(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 100)
    prepare(PrepareConfig(sources=(str(tmp_path / "a.txt"),), validation_share=0.1), tmp_path / "out")
    data = open_data(str(tmp_path / "out"))
    assert (len(data.train), len(data.validation)) == (901, 100)
    assert data.validation.read(0, 10).tolist() == list(b"abcdefghij")


def test_workers_change_neither_tokens_nor_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_PIECE_DOCUMENTS", 50)
    source = write_corpus(tmp_path, 1000)
    config = PrepareConfig(sources=(str(source),), validation_share=0.05, shard_tokens=30_000)
    for workers in (1, 2):
        prepare(config, tmp_path / str(workers), workers=workers)
    assert shard_sums(tmp_path / "1") == shard_sums(tmp_path / "2")
    assert (tmp_path / "1" / INDEX).read_text() == (tmp_path / "2" / INDEX).read_text()
    index, train, validation = open_shards(tmp_path / "1")
    assert len(index.train) > 3
    assert sum(s.documents for s in index.validation) == 50
    everything = b"".join(part.tobytes() for stream in (train, validation) for part in stream.parts)
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert sorted(everything.decode().split("\0")[1:]) == sorted(texts)


def test_a_kill_at_any_moment_loses_no_shard_and_changes_no_byte(tmp_path):
    source = write_corpus(tmp_path, 20_000)
    config = {"sources": (str(source),), "validation_share": 0.02, "shard_tokens": 100_000}
    prepare(PrepareConfig(**config), tmp_path / "whole")
    code = """
import os, signal, sys
from pathlib import Path
from efla.data import prepare as p

close, count = p._OpenShard.close, 0

def close_and_die(self):
    global count
    count += 1
    if count == {at} and not {after}:
        os.kill(os.getpid(), signal.SIGKILL)
    shard = close(self)
    if count == {at}:
        os.kill(os.getpid(), signal.SIGKILL)  # renamed, but not yet noted
    return shard

p._OpenShard.close = close_and_die
p.prepare(p.PrepareConfig(**{config!r}), Path({folder!r}))
"""
    kept = []
    filled = code.format(at=1, after=True, config=config, folder=str(tmp_path / "first"))
    assert run_fresh(filled).returncode == -signal.SIGKILL
    prepare(PrepareConfig(**config), tmp_path / "first")  # killed with the very first shard renamed and not noted
    assert shard_sums(tmp_path / "whole") == shard_sums(tmp_path / "first")
    for at, after in ((4, False), (6, True)):
        filled = code.format(at=at, after=after, config=config, folder=str(tmp_path / "killed"))
        assert run_fresh(filled).returncode == -signal.SIGKILL
        kept.append(len(json.loads((tmp_path / "killed" / "progress.json").read_text())["train"]))
    assert kept == [1, 3]  # a commit closes two shards; the first run died in its second, the next in its third
    prepare(PrepareConfig(**config), tmp_path / "killed")
    assert shard_sums(tmp_path / "whole") == shard_sums(tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("*.tmp"))


def test_other_settings_are_refused_and_a_finished_folder_is_left_alone(tmp_path):
    source = write_corpus(tmp_path, 20)
    config = PrepareConfig(sources=(str(source),))
    first = prepare(config, tmp_path / "out")
    source.unlink()  # nothing is read again
    assert prepare(config, tmp_path / "out") == first
    with pytest.raises(ValueError, match=r"prepared with other settings .*column: text there, body now"):
        prepare(PrepareConfig(sources=(str(source),), column="body"), tmp_path / "out")


def test_texts_that_changed_are_refused(tmp_path):
    source = write_corpus(tmp_path, 20)
    config = PrepareConfig(sources=(str(source),))
    prepare(config, tmp_path / "out")
    with open(source, "a") as stream:
        stream.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(ValueError, match=r"other settings or texts \(source_bytes: \d+ there, \d+ now\)"):
        prepare(config, tmp_path / "out")


def test_other_files_in_the_folder_are_left_alone_and_a_folder_is_held_by_one_run(tmp_path):
    source = write_corpus(tmp_path, 20)
    (tmp_path / "out").mkdir()
    for name in ("mine.tmp", "train-notes.tmp"):
        (tmp_path / "out" / name).write_text("keep me")
    (tmp_path / "out" / "train-00000.bin.tmp").write_text("left by a kill")
    with lock_folder(tmp_path / "out"), pytest.raises(RuntimeError, match="another run is writing to"):
        prepare(PrepareConfig(sources=(str(source),)), tmp_path / "out")
    prepare(PrepareConfig(sources=(str(source),)), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").glob("*.tmp")) == ["mine.tmp", "train-notes.tmp"]


def test_damage_is_found_by_size_and_by_checksum(tmp_path):
    prepare(PrepareConfig(sources=(str(write_corpus(tmp_path, 50)),)), tmp_path / "out")
    shard = tmp_path / "out" / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00000\.bin does not match its checksum"):
        open_shards(tmp_path / "out")
    shard.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"train-00000\.bin has \d+ bytes, expected"):
        open_shards(tmp_path / "out", verify=False)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00000\.bin is missing; prepare the text again"):
        open_shards(tmp_path / "out")
    (tmp_path / "out" / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="is not an index of efla prepare"):
        open_shards(tmp_path / "out")


def test_max_tokens_stops_early(tmp_path):
    source = write_corpus(tmp_path, 500)
    index = prepare(PrepareConfig(sources=(str(source),), max_tokens=5000, validation_share=0), tmp_path / "out")
    assert 5000 <= sum(s.tokens for s in index.train) < 6000


@pytest.mark.skipif(not has("sentencepiece") or not has("mistral_common"), reason="extra tokenizers is not installed")
def test_the_papers_tokenizer(tmp_path):
    tokenizer = load_tokenizer("mistral")
    assert (tokenizer.vocab_size, tokenizer.bos_token) == (32_000, 1)
    assert tokenizer.encode(["Exact flow linear attention"])[0].tolist() == [1, 1529, 572, 4699, 9270, 4501]
    tokenizer.save(tmp_path)
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["Exact flow linear attention", "naïve café: 漢字 🙂\n  two spaces", "1 + 1 = 2", readers.__doc__]
    files = sorted(Path(readers.__file__).parent.glob("*.py"))
    for text in [
        *texts,
        *(" " * n + "x" for n in range(40)),
        *(f.read_text() for f in files if f.stem != "tokenizers"),
    ]:
        assert saved.encode(text) == tokenizer.encode([text])[0].tolist()
        assert saved.decode(saved.encode(text), skip_special_tokens=True) == text


def test_any_tokenizers_file_will_do(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], show_progress=False)
    inner.train_from_iterator([write_corpus(tmp_path, 50).read_text()], trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.bos_token) == (len(inner.get_vocab()), 0)
    assert tokenizer.encode(["alpha beta"])[0].tolist() == [0, *inner.encode("alpha beta").ids]
    text = (tmp_path / "tokenizer.json").read_text().replace('"<s>"', '"</s>"')
    (tmp_path / "other.json").write_text(text)
    assert load_tokenizer(str(tmp_path / "other.json")).bos_token == 0, "the last of the known names"


def test_ids_take_the_smallest_type():
    assert [token_type(n).itemsize for n in (256, 257, 65_536, 65_537)] == [1, 2, 2, 4]
    assert ByteDocuments().encode(["a\0b"])[0].tolist() == [0, 97, 98]


@pytest.mark.skipif(not has("datasets"), reason="datasets is not installed (extra train)")
def test_a_data_set_is_streamed_by_name(tmp_path, monkeypatch):
    """By datasets' own loader, on a folder in place of a name: nothing is downloaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(LINES)
    config = PrepareConfig(sources=(f"hf:{tmp_path / 'set'}",), validation_share=0)
    prepare(config, tmp_path / "out")
    _, train, _ = open_shards(tmp_path / "out")
    assert train.read(0, len(train)).astype(np.uint8).tobytes().decode().split("\0")[1:] == TEXTS
    assert list(preparing._documents(config, skip=3)) == TEXTS[3:]


def test_the_command_says_what_it_made(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text with a NUL \0 in it " * 20)
    assert cli.main(["prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "20 NUL characters were left out" in shown
    assert "training" in shown
    assert f"efla train --data {tmp_path / 'out'}" in shown


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OSError, match="cannot write to"):
        prepare(PrepareConfig(sources=(str(write_corpus(tmp_path, 5)),)), tmp_path / "locked" / "out")
