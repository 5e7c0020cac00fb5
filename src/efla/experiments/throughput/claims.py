"""Throughput from rows: medians and quartiles over rounds, the paper's claims, summary for the terminal."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from efla.experiments.lm.config import ARM_ORDER
from efla.experiments.throughput.config import PAIRS
from efla.runs.records import Record
from efla.runs.statistics import NOT_JUDGED, NOT_SEEN, SEEN, Claim, claims_text

NEAR = 0.05
"""What "nearly identical" means here: a median ratio within 5 % of 1. The paper does not say."""
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


def ratio(row: Record, ours: str, theirs: str) -> Quartiles:
    """Throughput of ours over that of theirs, round by round."""
    pairs = zip(row["timing"][ours]["seconds"], row["timing"][theirs]["seconds"], strict=True)
    return quartiles([b / a for a, b in pairs])


def operations(row: Record, arm: str) -> float:
    """Useful operations per second at the median: three times those of the forward pass for every token."""
    return tokens_per_second(row, arm).median * float(row["arms"][arm]["flops_per_token"])


def speed_text(row: Record, arm: str) -> str:
    return tokens_per_second(row, arm).text(0)


def operations_text(row: Record, arm: str) -> str:
    return f"{operations(row, arm) / 1e9:,.1f}"


def memory_text(row: Record, arm: str) -> str:
    """Growth of memory in a step at its peak, in MB."""
    found = row["timing"][arm]["peak_memory_growth"]
    return "–" if found is None else f"{int(found) / 1e6:,.0f}"  # noqa: RUF001


def claims(rows: Sequence[Record]) -> list[Claim]:
    """Claims (a) on throughput and (b) on parameters, for the pair and the gated pair."""
    cells, found = sorted_cells(rows), []
    for ours, theirs in pairs_of(cells):
        ratios = [ratio(row, ours, theirs) for row in cells]
        rounds = min(r.rounds for r in ratios)
        middle = statistics.median(r.median for r in ratios)
        each = "; ".join(f"{name(row)}: {r.text()}" for row, r in zip(cells, ratios, strict=True))
        numbers = f"ratio {middle:.3f} over settings; {each} (median and quartiles of {rounds} rounds; near: within {NEAR:.0%})"
        is_near = all(abs(r.median - 1) <= NEAR for r in ratios)
        verdict = NOT_JUDGED if rounds < 5 else SEEN if is_near else NOT_SEEN
        found.append(Claim("a", _SPEED, f"{ours} over {theirs}, tokens per second", verdict, numbers))
    for ours, theirs in pairs_of(cells):
        counts = {(row["arms"][ours]["parameters"], row["arms"][theirs]["parameters"]) for row in cells}
        text = "; ".join(f"{a:,} against {b:,}" for a, b in sorted(counts))
        verdict = SEEN if all(a == b for a, b in counts) else NOT_SEEN
        found.append(Claim("b", _PARAMETERS, f"{ours} against {theirs}", verdict, text))
    return found


def text_summary(rows: Sequence[Record]) -> str:
    """Tokens per second, operations and memory by shape and arm, and the claims, as plain text."""
    cells = sorted_cells(rows)
    if not cells:
        return "no finished cells yet"
    first, config = cells[0], cells[0]["config"]
    where = f"{first['device']}, {first['threads']} thread(s), {config['precision']}, size {config['size']}"
    lines = [f"training tokens per second (median and quartiles), length×batch; {where}"]  # noqa: RUF001
    lines.append(f"{'':<18}" + "".join(f"{name(row):>28}" for row in cells))
    for title, text in (
        ("", speed_text),
        ("useful operations per second, 10^9", operations_text),
        ("growth of memory in a step at its peak, MB", memory_text),
    ):
        lines += [title] if title else []
        lines += [f"{arm:<18}" + "".join(f"{text(row, arm):>28}" for row in cells) for arm in arms_of(cells)]
    return "\n".join([*lines, "", *claims_text(claims(rows))])
