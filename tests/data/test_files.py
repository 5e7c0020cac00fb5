"""Where data files are looked for, and how they are unpacked."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from efla.data.files import data_folder, find_file, read_unpacked

TEXT = b"some text\n" * 1000


def test_the_option_comes_before_the_variable_and_must_be_a_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("EFLA_DATA", raising=False)
    assert data_folder(None) is None
    monkeypatch.setenv("EFLA_DATA", str(tmp_path))
    assert data_folder(None) == data_folder("") == tmp_path
    assert data_folder(Path("/")) == Path("/")
    with pytest.raises(FileNotFoundError, match="--data is '/no/such', which is not a folder"):
        data_folder("/no/such")
    monkeypatch.setenv("EFLA_DATA", "/no/such")
    with pytest.raises(FileNotFoundError, match="EFLA_DATA is '/no/such'"):
        data_folder(None)


def test_earlier_names_are_found_first_in_any_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    folders = (tmp_path, tmp_path / "sub")
    assert find_file(folders, "a", "a.gz") is None
    (tmp_path / "a.gz").touch()
    assert find_file(folders, "a", "a.gz") == tmp_path / "a.gz"
    (tmp_path / "sub" / "a").touch()
    assert find_file(folders, "a", "a.gz") == tmp_path / "sub" / "a"


@pytest.mark.parametrize("name", ["a", "a.gz", "a.xz", "a.bz2"])
def test_files_are_unpacked_by_their_suffix_and_damage_is_named(name, tmp_path):
    pack = {"a": bytes, "a.gz": gzip.compress, "a.xz": lzma.compress, "a.bz2": bz2.compress}[name]
    file = tmp_path / name
    file.write_bytes(pack(TEXT))
    assert read_unpacked(file) == TEXT
    with pytest.raises(FileNotFoundError):
        read_unpacked(tmp_path / "none.gz")
    if name != "a":
        for damaged in (pack(TEXT)[:-9], b"nonsense"):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{name} is damaged .*copy or download it again"):
                read_unpacked(file)
