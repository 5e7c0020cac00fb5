"""Every Python block of the README and the docs runs, the blocks of one page in order and in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")] if "```python" in page.read_text()
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_readme_shows_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


NUMBERS = r"[+-]\d+\.\d+ (?:points|%|bits|nats) \[[^\]]+\]"
"""A difference with its interval."""


@pytest.mark.parametrize("page", ["smnist", "mad", "lm", "paper", "when-exact-helps"])
def test_differences_and_intervals_are_those_of_the_page_of_claims(page):
    """tests/report/test_front.py shows that the page of claims is what the rows say."""
    results = ROOT / "docs" / "results"
    claims = (results / "claims.md").read_text()
    found = re.findall(NUMBERS, (results / f"{page}.md").read_text())
    assert len(found) >= 4
    assert [number for number in found if number not in claims] == []


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src/efla|csrc|docs|tests)/[\w./-]+)`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_walks_have_at_most_eight_hops():
    walks = (ROOT / "CONTRIBUTING.md").read_text().split("## Five walks")[1].split("\n## ")[0]
    steps = re.split(r"^\d\. ", walks, flags=re.MULTILINE)[1:]
    assert len(steps) == 5
    assert all(step.count("→") < 8 for step in steps)
