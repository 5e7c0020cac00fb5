"""Throughput from rows: medians and quartiles over rounds, the paper's claims, summary for the terminal."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from efla.experiments.lm.config import ARM_ORDER
from efla.experiments.throughput.config import PAIRS
from efla.runs.names import name_of
from efla.runs.records import Record
from efla.runs.statistics import MISSING, NOT_JUDGED, NOT_SEEN, REVERSED, SEEN, Claim, difference, within
from efla.runs.text import claims_text, text_table

NEAR = 0.05
"""What "nearly identical" means here: a ratio within 5 % of 1. The paper does not say."""
_SPEED = "EFLA trains at nearly the same throughput as DeltaNet in all settings"
_PARAMETERS = "EFLA introduces no additional parameters"


class Quartiles(NamedTuple):
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def text(self, digits: int = 3) -> str:
        """``0.987 (0.981 to 0.993)``."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high, len(values))


def sorted_cells(rows: Sequence[Record]) -> list[Record]:
    """The rows of all shapes, by length and batch. All have the same arms."""
    found = [row for row in rows if row.get("row") == "cell" and "length" in row]
    return sorted(found, key=lambda row: (row["length"], row["batch"]))


def arms_of(cells: Sequence[Record]) -> list[str]:
    return [arm for arm in ARM_ORDER if any(arm in row["timing"] for row in cells)]


def pairs_of(cells: Sequence[Record]) -> list[tuple[str, str]]:
    """The pairs, ours and theirs, whose arms were timed."""
    arms = arms_of(cells)
    return [(ours, theirs) for ours, theirs in PAIRS.items() if ours in arms and theirs in arms]


def name(row: Record) -> str:
    """A shape as length × batch."""
    return f"{row['length']:,}×{row['batch']}"  # noqa: RUF001


def tokens_per_second(row: Record, arm: str) -> Quartiles:
    return quartiles([row["tokens"] / seconds for seconds in row["timing"][arm]["seconds"]])


def ratios(row: Record, ours: str, theirs: str) -> list[float]:
    """Throughput of ours over that of theirs, round by round."""
    return [b / a for a, b in zip(*(row["timing"][arm]["seconds"] for arm in (ours, theirs)), strict=True)]


def operations(row: Record, arm: str) -> str:
    """10^9 useful operations per second at the median: three times those of the forward pass for every token."""
    return f"{tokens_per_second(row, arm).median * float(row['arms'][arm]['flops_per_token']) / 1e9:,.1f}"


def memory(row: Record, arm: str) -> str:
    """Growth of memory in a step at its peak, in MB."""
    found = row["timing"][arm]["peak_memory_growth"]
    return MISSING if found is None else f"{int(found) / 1e6:,.0f}"


def lines_of(cells: Sequence[Record], text: Callable[[Record, str], str]) -> list[list[str]]:
    """The lines of a table: one an arm, with the text of each shape."""
    return [[name_of(arm), *(text(row, arm) for row in cells)] for arm in arms_of(cells)]


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on throughput and (b) on parameters, for the pair and the gated pair.

    Throughput is nearly the same if in every setting the 95 % interval of the mean ratio over rounds lies within NEAR.
    """
    cells, speed, size = sorted_cells(rows), [], []
    for ours, theirs in pairs_of(cells):
        pair = f"{name_of(ours)} over {name_of(theirs)}"
        each = [difference(100 * (value - 1) for value in ratios(row, ours, theirs)) for row in cells]
        verdicts = [within(found, 100 * NEAR) for found in each]
        verdict = next((kind for kind in (NOT_JUDGED, REVERSED, NOT_SEEN) if kind in verdicts), SEEN)
        furthest = max(range(len(each)), key=lambda i: max(-each[i].low, each[i].high))
        reason = f"shown: {name(cells[furthest])}; {verdicts.count(SEEN)} of {len(each)} settings within ± {NEAR:.0%}"
        speed.append(Claim("a", _SPEED, f"every setting, {pair}", verdict, reason, each[furthest], "%"))
        rounds = zip(*(ratios(row, ours, theirs) for row in cells), strict=False)
        mean = difference(100 * (statistics.fmean(values) - 1) for values in rounds)
        reason = f"the interval against ± {NEAR:.0%}"
        speed.append(Claim("a", _SPEED, f"mean of settings, {pair}", within(mean, 100 * NEAR), reason, mean, "%"))
        counts = {(row["arms"][ours]["parameters"], row["arms"][theirs]["parameters"]) for row in cells}
        text = "; ".join(f"{a:,} against {b:,}" for a, b in sorted(counts))
        verdict = SEEN if all(a == b for a, b in counts) else NOT_SEEN
        size.append(Claim("b", _PARAMETERS, f"parameters, {pair}", verdict, text))
    return [*speed, *size]


def text_summary(rows: Sequence[Record], verbose: bool = False) -> str:
    """Tokens per second by shape and arm, and the claims, as plain text; verbose: quartiles, operations and memory."""
    cells = sorted_cells(rows)
    if not cells:
        return "no finished cells yet"
    first, config = cells[0], cells[0]["config"]
    where = f"{first['device']}, {first['threads']} thread(s), {config['precision']}, size {config['size']}"
    texts: dict[str, Callable[[Record, str], str]] = {
        "length×batch": lambda row, arm: f"{tokens_per_second(row, arm).median:,.0f}"  # noqa: RUF001
    }
    if verbose:
        texts |= {"10^9 operations/s": operations, "growth of memory, MB": memory}
    lines = [f"Training tokens per second, medians; {where}"]
    for title, text in texts.items():
        lines += text_table([title, *map(name, cells)], lines_of(cells, text))
    return "\n".join([*lines, "", *claims_text(claims(rows), verbose)])
