"""``efla report RUNS…``: one self-contained HTML page from the rows of run folders."""

from pathlib import Path
from typing import Annotated

import tyro

from efla.runs.rows import write_atomically
from efla.runs.text import claims_text


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output: Path = Path("report.html"),
    markdown: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(optional)")] = None,
) -> int:
    """Make the report: a verdict per claim of the paper, figures, tables, settings, and limits of the conclusions.

    Args:
        runs: output folders of `efla reproduce` or `efla eval`.
        output: the HTML file to write.
        markdown: also write the claims, verdicts and numbers to this Markdown file.
    """
    from efla.report.markdown import markdown as claims_page
    from efla.report.page import build

    sections = build(runs, output)
    for section in sections:
        print(f"{section.title} ({section.source})")
        for line in claims_text(section.claims):
            print(f"  {line}")
        print(f"  {section.budget}")
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(markdown, claims_page(sections).encode())
        print(f"\nclaims: {markdown.resolve()}")
    print(f"\nreport: {output.resolve()}")
    return 0
