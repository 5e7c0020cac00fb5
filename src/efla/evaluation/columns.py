"""The columns of the paper's table: which task and metric each is, its chance level, and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One number of the table. ``unit`` 100 shows a fraction as percent; ``chance`` is in what is shown."""

    key: str
    title: str
    task: str
    metric: str
    unit: float = 100.0
    chance: float | None = None
    lower_is_better: bool = False
    is_accuracy: bool = True


COLUMNS = (
    Column("wikitext", "Wiki. ppl", "wikitext", "word_perplexity", 1.0, None, True, False),
    Column("lambada_ppl", "LMB. ppl", "lambada_openai", "perplexity", 1.0, None, True, False),
    Column("lambada", "LMB. acc", "lambada_openai", "acc", chance=0.0),
    Column("piqa", "PIQA", "piqa", "acc", chance=50.0),
    Column("hellaswag", "Hella.", "hellaswag", "acc_norm", chance=25.0),
    Column("winogrande", "Wino.", "winogrande", "acc", chance=50.0),
    Column("arc_easy", "ARC-e", "arc_easy", "acc", chance=25.0),
    Column("arc_challenge", "ARC-c", "arc_challenge", "acc_norm", chance=25.0),
    Column("boolq", "BoolQ", "boolq", "acc", chance=62.2),
    Column("openbookqa", "OBQA", "openbookqa", "acc_norm", chance=25.0),
    Column("sciq", "SciQ", "sciq", "acc", chance=25.0),
)
"""BoolQ's chance is its majority class. ARC has a few questions with 3 or 5 choices; 25 is what guessing gives."""

ACCURACIES = tuple(column for column in COLUMNS if column.is_accuracy)
PAPER_TASKS = tuple(dict.fromkeys(column.task for column in COLUMNS))

CARRIED = "wikitext_carried"
EXTRA_COLUMNS = (
    Column("wikitext_bits", "Wiki. bits/byte", "wikitext", "bits_per_byte", 1.0, None, True, False),
    Column("carried", "Wiki. ppl, state carried", CARRIED, "word_perplexity", 1.0, None, True, False),
    Column("carried_bits", "Wiki. bits/byte, state carried", CARRIED, "bits_per_byte", 1.0, None, True, False),
    Column("lambada_bits", "LMB. bits/byte", "lambada_openai", "bits_per_byte", 1.0, None, True, False),
)
"""Ours, not in the paper's table: bits per byte, and WikiText with the state carried over windows."""

_PAPER = {
    "340M": {
        "Mamba-2": (36.90, 105.69, 20.7, 61.9, 30.7, 50.2, 40.4, 22.1, 53.0, 27.0, 71.9),
        "DeltaNet": (38.09, 96.26, 22.5, 60.7, 30.1, 51.9, 41.7, 21.6, 60.1, 29.0, 70.4),
        "EFLA": (35.26, 79.97, 23.9, 61.0, 30.9, 51.1, 42.5, 23.8, 59.7, 30.8, 72.9),
        "Gated DeltaNet": (34.93, 72.46, 25.5, 62.7, 30.8, 49.3, 41.8, 21.7, 61.7, 27.4, 74.2),
        "Gated EFLA": (34.28, 69.37, 26.4, 61.8, 31.1, 52.1, 42.0, 22.8, 62.1, 29.4, 75.3),
    },
    "1.3B": {
        "DeltaNet": (18.38, 17.29, 41.8, 69.2, 44.5, 49.3, 52.5, 26.4, 58.1, 29.8, 82.6),
        "EFLA": (18.30, 16.54, 43.2, 68.9, 44.5, 52.1, 54.4, 26.4, 60.4, 31.6, 84.2),
    },
}
PRINTED_AVERAGES = {
    "340M": {"Mamba-2": 42.0, "DeltaNet": 42.2, "EFLA": 44.1, "Gated DeltaNet": 43.9, "Gated EFLA": 44.8},
    "1.3B": {"DeltaNet": 50.5, "EFLA": 51.8},
}
"""The averages the paper prints. DeltaNet's at 340M is not the mean of its row, which is 43.11; see the table's mean."""


def paper_rows(size: str) -> dict[str, dict[str, float]]:
    """The paper's numbers at "340M" (8B tokens) or "1.3B" (50B tokens): model -> column key -> what the paper prints."""
    keys = [column.key for column in COLUMNS]
    return {model: dict(zip(keys, values, strict=True)) for model, values in _PAPER[size].items()}


def mean_accuracy(shown: Mapping[str, float | None]) -> float | None:
    """The mean of the nine accuracies, recomputed; ``None`` unless all nine are there."""
    values = [shown.get(column.key) for column in ACCURACIES]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(ACCURACIES) else None
