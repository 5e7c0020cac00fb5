"""The table of Qwen3.5 on a CPU is what the committed rows say."""

from __future__ import annotations

import json
from pathlib import Path

from efla.bench.qwen import ACCELERATED, FLOOR, TRANSFORMERS

ROOT = Path(__file__).parent.parent.parent


def table_lines():
    for run in json.loads((ROOT / "benchmarks/results/qwen.json").read_text()):
        works = {row["work"]: {} for row in run["rows"]}
        for row in run["rows"]:
            works[row["work"]][row["contender"]] = row["median"] / (16 if row["work"].startswith("decode") else 1)
        for work, seconds in works.items():
            name, size, dtype = work.replace(" 16", "", 1).removesuffix(")").split(", ")
            plain, fast, floor = (seconds[c] for c in (TRANSFORMERS, ACCELERATED, FLOOR))
            yield (
                f"| {name}, {size.removeprefix('Qwen3.5 ')}, {dtype} | {run['threads']} | {1e3 * plain:,.1f} ms "
                f"| {1e3 * fast:,.1f} ms | {plain / fast:.2f}\N{MULTIPLICATION SIGN} | {floor / fast:.2f} |"
            )


def test_the_page_shows_every_row():
    page = (ROOT / "docs/explanation/speed.md").read_text().splitlines()
    lines = list(table_lines())
    assert len(lines) >= 12
    assert [line for line in lines if line not in page] == []
