"""Tables and claims as plain text for a terminal of 80 columns."""

from collections.abc import Sequence
from itertools import accumulate
from textwrap import fill

from efla.runs.statistics import MISSING, NOT_JUDGED, Claim, grouped

ONE_SEED = "One seed gives no verdict: --seeds adds more."


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, as narrow as they can be: the first column aligned to the left, the others to the right.

    Columns beyond 80 characters follow as another table, of the rows that have values there.
    """
    lines = [columns, *([cell.replace(" ± ", "±") for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    ends = accumulate(widths, lambda end, width: end + 2 + width)
    shown = max(2, sum(end <= 80 for end in ends))
    table = []
    for name, *cells in lines:
        values = [cell.rjust(width) for cell, width in zip(cells, widths[1:shown], strict=False)]
        table.append("  ".join([name.ljust(widths[0]), *values]))
    if shown < len(columns):
        others = ([row[0], *row[shown:]] for row in rows)
        table += text_table([columns[0], *columns[shown:]], [row for row in others if set(row[1:]) != {MISSING}])
    return table


def claims_text(claims: Sequence[Claim], verbose: bool = False) -> list[str]:
    """The first comparison of each claim in 80 columns; verbose: every comparison with its reason, below the sentence."""
    lines = []
    for first, comparisons in grouped(claims):
        if verbose:
            lines.append(f"({first.letter}) {first.sentence}")
            lines += [f"    {claim.verdict}: {claim.pair}: {claim.text()}" for claim in comparisons]
            continue
        shown = first.difference.text(first.unit, short=True) if first.difference else first.reason
        verdict = "" if first.verdict == NOT_JUDGED and first.difference else f"{first.verdict.upper()}  "
        line = f"({first.letter}) {first.pair}: {verdict}{shown}"
        lines += fill(line, 80, subsequent_indent="    ").splitlines()
    listed = claims if verbose else [first for first, _ in grouped(claims)]
    if any(claim.difference and claim.difference.n == 1 for claim in listed):
        lines.append(ONE_SEED)
    return lines
