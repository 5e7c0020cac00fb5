"""Python blocks of the README and the docs run, links lead somewhere, and what is generated is what the rows say."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
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


def test_every_page_is_linked_from_the_index_and_named_in_the_navigation():
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "index.md").read_text()))
    assert pages == set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) - {"index.md"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "results/README.md", "examples/README.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    found = re.findall(r"(?:\]\(|src=\"|srcset=\")(?!http|#)([^)#\"]+)", (ROOT / page).read_text())
    assert [link for link in found if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("module", ["efla", "efla.layers", "efla.models", "efla.ops", "efla.rules", "efla.state"])
def test_every_public_name_has_its_place_in_the_reference(module):
    page = (ROOT / "docs/reference/api.md").read_text()
    names = [name for name in importlib.import_module(module).__all__ if f"\n## efla.{name}\n" not in page]
    assert [name for name in names if not re.search(rf"^::: [\w.]+\.{name}$", page, re.MULTILINE)] == []


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(ROOT / "docs/scripts"))
    try:
        yield importlib.import_module("generate")
    finally:
        sys.path.remove(str(ROOT / "docs/scripts"))


def test_the_tables_of_the_readme_and_the_claims_are_what_the_rows_say(generate, monkeypatch):
    """Make them again: make readme."""
    from efla.report.front import by_unit
    from efla.report.page import sections_of

    monkeypatch.chdir(ROOT)
    sections = [section for folder in generate.result_folders() for section in sections_of(folder)]
    for page, text in generate.pages(sections).items():
        assert text == page.read_text(), page
    assert len(generate.README.read_text().splitlines()) < 160
    plot = html.unescape((ROOT / "docs/figures/claims.svg").read_text())
    shown = [claim for claims in by_unit(generate.claim_lines(sections)).values() for claim in claims]
    assert shown
    assert all(f"{claim.sentence} ({claim.pair}): {claim.verdict}, {claim.text()}" in plot for claim in shown)


def test_the_page_of_the_command_line_has_every_option(generate, monkeypatch):
    """Its layout may differ between versions of tyro. Make it again: make readme."""
    monkeypatch.setenv("COLUMNS", "80")
    page = generate.COMMAND_LINE.read_text()
    for heading, text in re.findall(r"^## `(.+?)`$\n(.*?)```$", generate.command_line(), re.DOTALL | re.MULTILINE):
        (written,) = re.findall(rf"^## `{heading}`$\n(.*?)```$", page, re.DOTALL | re.MULTILINE)
        options = [set(re.findall(r"(?<![\w-])--[a-z][\w-]*", part)) for part in (text, written)]
        assert options[0] == options[1], heading


def test_the_speed_table_takes_new_files_and_keeps_ratios_within_one_run(generate, tmp_path):
    def write(name, simd, threads, date, times):
        rows = [{"work": "forward B1 T4096 H8 D64", "contender": c, "median": t} for c, t in times.items()]
        facts = {"SIMD (native)": f"{simd} (of avx2)"}
        record = {"facts": facts, "machine": "M", "threads": threads, "date": date, "rows": rows}
        (tmp_path / name).write_text(json.dumps(record))

    write("scan.json", "avx2", 2, "2026-01-01", {"native": 0.010, "transformers": 0.080, "sgemm": 0.005})
    write("peers.json", "avx2", 2, "2026-01-02", {"native": 0.020, "ggml": 0.050})
    write("single.json", "avx2", 1, "2026-01-03", {"native": 0.030, "transformers": 0.900})
    table = generate.speed_tables.speed_table(tmp_path)
    assert "| AVX2 | efla | ggml | transformers |" in table
    assert "| 20 ms | 2.5\N{MULTIPLICATION SIGN} | 8.0\N{MULTIPLICATION SIGN} |" in table
    assert "AVX-512" not in table
    assert table.endswith("AVX2: M, 2 threads.")
    write("single.json", "avx512", 1, "2026-01-03", {"native": 0.030, "transformers": 0.900})
    table = generate.speed_tables.speed_table(tmp_path)
    assert "| AVX-512 (AVX2) | efla | ggml | transformers |" in table
    # A cell without a number for the first set would read as one of it.
    assert (
        "| 30 ms (20 ms) | (2.5\N{MULTIPLICATION SIGN}) | 30.0\N{MULTIPLICATION SIGN} (8.0\N{MULTIPLICATION SIGN}) |"
        in table
    )
    assert table.endswith("AVX-512: M, 1 thread; AVX2: M, 2 threads.")


def test_tables_of_products_and_runtimes_show_every_row(generate, tmp_path):
    tables = "products", "runtimes", "peers", "qwen", "goals"
    assert {getattr(generate.speed_tables, f"{name}_table")(tmp_path) for name in tables} == {"Not measured yet."}
    facts = {"machine": "M", "date": "2026-01-01T00:00:00"}
    times = {"model": 0.002, "its products": 0.001, "ONNX Runtime": 0.003}
    rows = [{"work": "decode batch 1, tiny", "threads": 2, "contender": c, "median": t} for c, t in times.items()]
    (tmp_path / "products-avx2.json").write_text(json.dumps({**facts, "rows": rows}))
    assert "| decode batch 1, tiny | 2 | 2 ms | 1 ms | 2.00 | 1.50 |" in generate.speed_tables.products_table(tmp_path)
    row = {"model": "tiny", "contender": "ONNX Runtime int8", "threads": 1, "per_second": 1234.5, "bytes": 5e5}
    row |= {"held_out_loss": 1.5, "same_tokens": False}
    record = {**facts, "trained": {"tiny": "300 steps"}, "rows": [row]}
    (tmp_path / "runtimes-avx2.json").write_text(json.dumps(record))
    table = generate.speed_tables.runtimes_table(tmp_path)
    assert "| tiny | ONNX Runtime int8 | 1 | 1,234 | 0.50 MB | 1.5000 | no |" in table
    assert "M, 2026-01-01. Trained for tiny: 300 steps." in table
    row = {
        "work": "decode B1 T1 H8 D64",
        "threads": 1,
        "contender": "native",
        "median": 2e-5,
        "error": 1e-7,
        "ratio": 1.0,
    }
    record = {**facts, "rows": [row, {**row, "contender": "onnxruntime", "error": 2e-7, "ratio": 0.82}]}
    (tmp_path / "peers-avx2.json").write_text(json.dumps(record))
    table = generate.speed_tables.peers_table(tmp_path)
    assert "| decode B1 T1 H8 D64 | 1 | 20 µs | 0.82\N{MULTIPLICATION SIGN} |" in table
    assert "against the float64 oracle: native 1e-07, ONNX Runtime 2e-07." in table
    times = {"transformers Qwen3.5": 0.048, generate.speed_tables.ACCELERATED: 0.016, "its products": 0.012}
    work = {"work": "decode 16, Qwen3.5 4 layers of 512, float32", "threads": 2, "items": 16}
    rows = [{**work, "contender": contender, "median": seconds} for contender, seconds in times.items()]
    (tmp_path / "qwen-avx2.json").write_text(json.dumps([{**facts, "rows": rows}]))
    assert (
        "| decode, 4 layers of 512, float32 | 2 | 3 ms | 1 ms | 3.00\N{MULTIPLICATION SIGN} | 0.75 |\n\nM, 2026-01-01."
        in generate.speed_tables.qwen_table(tmp_path)
    )


def test_changes_of_the_authors_block_are_compared_on_equal_seeds_and_images(generate):
    rows = []
    for block, arm, seed, level in (
        ("authors", "exact-flow", 42, 0.5), ("authors", "exact-flow", 44, 0.7), ("authors", "exact-flow", 51, 0.0),
        ("authors", "delta-raw", 44, 0.1), ("authors-silu", "exact-flow", 42, 0.6), ("authors-silu", "exact-flow", 44, 0.8),
        ("authors-clamped", "exact-flow", 44, 0.7),
    ):  # fmt: skip
        run = {"block": block, "arm": arm, "rate": 3e-3, "seed": seed}
        rows.append({**run, "row": "cell", "clean_accuracy": 0.9, "diverged": False})
        for kind in ("scale", "noise", "dropout"):
            for size in (1 if kind == "scale" else 0, *((2, 4) if kind == "scale" else (0.5,))):
                test = {"kind": kind, "level": size, "accuracy": 0.99, "accuracy_test2k": level}
                rows.append({**run, **test, "row": "level"})
    none, silu, clamped = generate._changes(rows).splitlines()[2:]
    assert none.startswith("| none | EFLA |")
    assert none.count("60.0 \N{PLUS-MINUS SIGN} 14.1") == 6
    assert none.endswith("| 0 of 2 |")
    assert silu.count("70.0 \N{PLUS-MINUS SIGN} 14.1") == 6
    assert clamped.endswith("| 70.0 | 70.0 | 0 of 1 |")


def test_goals_are_judged_at_equal_work_and_missed_ones_are_bold(generate, tmp_path):
    tables = generate.speed_tables

    def row(work, contender, median, flops=1e6):
        return {"work": work, "contender": contender, "median": median, "useful_flops": flops}

    rows = [row(f"forward {size}", "native", 0.002) for size in (tables.B1, tables.B128, tables.B1_WIDE)]
    rows += [
        row(f"forward {tables.B1}", "transformers", 0.020),
        row(f"forward {tables.B128}", "transformers", 0.014),
    ]
    rows += [row(f"forward {tables.B1_WIDE}", "sgemm", 0.0156, flops=1e7)]  # 0.78 of its rate
    for simd in ("avx2", "avx512"):
        record = {"machine": "M", "date": "2026-01-01", "facts": {"SIMD (native)": f"{simd} (of {simd})"}, "rows": rows}
        (tmp_path / f"scan-{simd}.json").write_text(json.dumps(record))
    table = tables.goals_table(tmp_path)
    line = "| forward | transformers' chunk function | ≥ 9x | 10.0x; **7.00x** | 10.0x; **7.00x** |"
    assert line.replace("x", "\N{MULTIPLICATION SIGN}") in table
    assert "| forward, D128 | sgemm | ≥ 0.75 (AVX-512); ≥ 0.80 (AVX2) | **0.78** | 0.78 |" in table


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs: make docs")
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "explanation/derivations.html").read_text()
    assert "katex.min.js" in page
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+", page) == []
    api = (tmp_path / "reference/api.html").read_text()
    assert "output_final_state" in api
    assert ":::" not in api


NUMBERS = r"[+-]\d+\.\d+ (?:points|%|bits|nats) \[[^\]]+\]"
"""A difference with its interval."""


@pytest.mark.parametrize("page", ["smnist", "mad", "lm", "paper", "when-exact-helps"])
def test_differences_and_intervals_are_those_of_the_page_of_claims(page):
    """Or of a generated table of sequential MNIST. Other tests show that both are what the rows say."""
    results = ROOT / "docs" / "results"
    claims = (results / "claims.md").read_text()
    claims += "".join(
        table
        for _, table in re.findall(r"(?s)<!-- ([\w.-]+) -->(.*?)<!-- /\1 -->", (results / "smnist.md").read_text())
    )
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
