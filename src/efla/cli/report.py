"""``efla report RUNS…``: one self-contained HTML page from the rows of run folders."""

from pathlib import Path
from textwrap import shorten
from typing import Annotated, Literal

import tyro

from efla.runs.rows import write_atomically


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")],
    output: Path = Path("report.html"),
    markdown: Path | None = None,
    figures: Path | None = None,
    formats: tuple[Literal["svg", "png", "pdf"], ...] = ("svg",),
) -> int:
    """Make the report: a verdict per claim of the paper, figures, tables, settings, and limits of the conclusions.

    Args:
        runs: Output folders of efla reproduce, efla eval or efla train; files among them are skipped.
        output: The HTML file to write.
        markdown: Also write the claims, verdicts and numbers to this Markdown file.
        figures: Also write every figure to this folder.
        formats: Formats of those figures: svg (a light and a dark one), png, pdf.
    """
    from efla.report.front import claim_lines
    from efla.report.page import build, claims_page
    from efla.runs.vega import save_all

    for file in (path for path in runs if path.is_file()):
        print(f"skipped {file}: a file, not a run folder")
    sections = build([path for path in runs if not path.is_file()], output)
    verdicts: dict[str, list[str]] = {}  # of a claim, by the runs of its experiment
    for line in claim_lines(sections):
        verdicts.setdefault(line.claim.sentence, []).append(line.claim.verdict)
    for sentence, found in verdicts.items():
        print(f"{' / '.join(dict.fromkeys(found)):<20}{shorten(sentence, 60, placeholder=' …')}")
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(markdown, claims_page(sections).encode())
        print(f"\nclaims: {markdown.resolve()}")
    if figures is not None:
        files = save_all((figure for section in sections for figure in section.figures), figures, formats)
        print(f"\nfigures: {len(files)} files in {figures.resolve()}")
    print(f"\nreport: {output.resolve()}\nnext:   open it in a browser")
    return 0
