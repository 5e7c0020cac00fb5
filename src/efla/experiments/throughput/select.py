"""Throughputs and ratios from rows: medians and quartiles over rounds, ratios taken within a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from efla.experiments.lm.config import ARM_ORDER
from efla.runs.records import Record


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


def cells(rows: Sequence[Record]) -> list[Record]:
    """The rows of settings, by length and batch."""
    found = [row for row in rows if row.get("row") == "cell" and "length" in row]
    return sorted(found, key=lambda row: (row["length"], row["batch"]))


def arms_of(rows: Sequence[Record]) -> list[str]:
    found = {arm for row in cells(rows) for arm in row["timing"]}
    return [arm for arm in ARM_ORDER if arm in found]


def name(row: Record) -> str:
    """A setting: length × batch."""
    return f"{row['length']:,}×{row['batch']}"  # noqa: RUF001


def tokens_per_second(row: Record, arm: str) -> Quartiles | None:
    if arm not in row["timing"]:
        return None
    return quartiles([row["tokens"] / seconds for seconds in row["timing"][arm]["seconds"]])


def ratio(row: Record, ours: str, theirs: str) -> Quartiles | None:
    """Throughput of ours over that of theirs, round by round."""
    if ours not in row["timing"] or theirs not in row["timing"]:
        return None
    pairs = zip(row["timing"][ours]["seconds"], row["timing"][theirs]["seconds"], strict=True)
    return quartiles([b / a for a, b in pairs])


def operations(row: Record, arm: str) -> float | None:
    """Useful operations per second at the median: three times those of the forward pass for every token."""
    speed = tokens_per_second(row, arm)
    return None if speed is None else speed.median * float(row["arms"][arm]["flops_per_token"])


def memory(row: Record, arm: str) -> int | None:
    """Bytes by which a step made memory grow at its peak."""
    found = row["timing"].get(arm, {}).get("peak_memory_growth")
    return None if found is None else int(found)
