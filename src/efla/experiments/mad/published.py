"""Numbers printed elsewhere, to put beside ours; only the reference profile's may be compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from efla.experiments.mad import select
from efla.experiments.mad.config import profile
from efla.runs.records import Record, to_record


class Published(NamedTuple):
    """A model's score on each task, in percent, as a source prints it."""

    source: str
    model: str
    compression: float
    fuzzy: float
    recall: float
    memorization: float
    noisy: float
    copying: float
    mean: float

    def by_task(self) -> dict[str, float]:
        return {
            "compression": self.compression, "fuzzy-in-context-recall": self.fuzzy, "in-context-recall": self.recall,
            "memorization": self.memorization, "noisy-in-context-recall": self.noisy, "selective-copying": self.copying,
        }  # fmt: skip


_DELTANET = "DeltaNet paper (arXiv 2406.06484)"
_BENCH = "HassanJbara/lin-attn-bench"
_METALA = "MetaLA paper, table A6"
PUBLISHED = (
    Published(_DELTANET, "DeltaNet", 42.2, 35.7, 100, 52.8, 100, 100, 71.8),
    Published(_DELTANET, "Transformer", 51.6, 29.8, 94.1, 85.2, 86.8, 99.6, 74.5),
    Published(_DELTANET, "Mamba", 52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3),
    Published(_DELTANET, "GLA", 38.8, 6.9, 80.8, 63.3, 81.6, 88.6, 60.0),
    Published(_DELTANET, "Hyena", 45.2, 7.9, 81.7, 89.5, 78.8, 93.1, 66.0),
    Published(_DELTANET, "multi-head Hyena", 44.8, 14.4, 99.0, 89.4, 98.6, 93.0, 73.2),
    Published(_BENCH, "DeltaNet", 39.6, 39.3, 99.9, 39.4, 99.9, 99.7, 69.7),
    Published(_BENCH, "Gated DeltaNet", 43.5, 28.6, 99.9, 55.2, 99.9, 99.7, 71.2),
    Published(_BENCH, "Transformer", 43.2, 56.5, 90.5, 78.8, 89.7, 99.8, 76.4),
    Published(_BENCH, "Mamba", 49.1, 12.3, 99.3, 89.6, 99.7, 88.7, 73.1),
    Published(_BENCH, "GLA", 40.8, 15.5, 91.8, 77.1, 93.1, 89.1, 67.9),
    Published(_METALA, "Mamba", 43.95, 9.60, 87.92, 89.45, 90.91, 81.79, 67.27),
    Published(_METALA, "GLA", 37.70, 12.45, 91.58, 57.05, 92.58, 88.63, 63.33),
)

PAPER = {"DeltaNet": 65.7, "EFLA": 66.4}
"""The EFLA paper's averages over the six tasks; it prints no number per task."""


def follows_the_reference(rows: Sequence[Record]) -> bool:
    """Whether every arm was run on all settings with all rates and decays by the reference's protocol."""
    cells = select.runs(rows)
    whole = profile("reference")
    group = whole.groups[0]
    wanted = {(name, rate, decay) for name in group.settings for rate in group.rates for decay in group.decays}
    same = ("profile", "width", "heads", "batch", "memorization_batch", "steps", "epochs", "stop_above", "schedule")
    asked = to_record(whole)
    return all(
        wanted <= {(f"{row['task']}/{row['setting']}", row["rate"], row["decay"]) for row in cells if row["arm"] == arm}
        for arm in select.arms_of(rows)
    ) and all(row["config"][key] == asked[key] for row in cells for key in same)


def comparability(rows: Sequence[Record]) -> str:
    """The sentence that goes with every table."""
    if follows_the_reference(rows):
        return (
            "These runs follow the reference's protocol (all 66 settings, best of six runs each), so their scores may be "
            "put beside published ones; model selection looks at the test set, as the reference's does."
        )
    name = select.runs(rows)[0]["profile"]
    reason = (
        "the profile was not run whole and as it is"
        if name == "reference"
        else "it runs fewer settings with a smaller budget"
    )
    return f"Scores of the {name} profile may be compared across arms of the same profile, never with published ones: {reason}."
