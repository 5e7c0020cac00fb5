"""``efla explain``: the page of the documentation, written or opened."""

from __future__ import annotations

import importlib
from pathlib import Path

from efla.cli import main

PAGE = Path(__file__).parents[2] / "docs/explainer/index.html"


def test_the_page_is_written_to_a_file_or_into_a_folder(tmp_path, capsys):
    assert main(["explain", "--output", str(tmp_path)]) == 0
    assert main(["explain", "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "efla.html").read_bytes() == (tmp_path / "page.html").read_bytes() == PAGE.read_bytes()
    assert f"{tmp_path / 'page.html'}: {PAGE.stat().st_size:,} bytes" in capsys.readouterr().out


def test_the_page_is_opened_and_its_address_printed(monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["explain"]) == 0
    assert opened == [PAGE.as_uri()]
    assert capsys.readouterr().out.startswith(f"{PAGE.as_uri()}\nnext: efla ")


def test_a_page_that_is_not_there_and_a_folder_that_is_not_are_named(monkeypatch, tmp_path, capsys):
    assert main(["explain", "--output", str(tmp_path / "no/page.html")]) == 1
    assert "no/page.html" in capsys.readouterr().err
    module = importlib.import_module("efla.cli.explain")
    monkeypatch.setattr(module, "_PLACES", (tmp_path / "missing.html",))
    assert main(["explain"]) == 1
    assert "missing.html is missing); reinstall efla" in capsys.readouterr().err
