"""A run of seconds, and what is compared of its result."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from efla.train.config import (
    DataOptions,
    MachineOptions,
    ModelOptions,
    OptimizerOptions,
    TrainConfig,
    WatchOptions,
)
from efla.train.output import read_metrics

SIZES = (
    "hidden_size=32",
    "num_hidden_layers=2",
    "num_heads=2",
    "intermediate_size=32",
    "mamba_head_dim=16",
    "mamba_state_size=8",
)
_SECTIONS = {
    "model": ModelOptions,
    "data": DataOptions,
    "optimizer": OptimizerOptions,
    "machine": MachineOptions,
    "watch": WatchOptions,
}


def small(**changes: Any) -> TrainConfig:
    """12 steps of 4 rows of 32 bytes; ``changes`` by the names of the fields, in whichever section they are."""
    fields: dict[str, dict[str, Any]] = {
        "model": {"model": "efla-tiny", "set": SIZES},
        "data": {"length": 32, "rows": 4},
        "optimizer": {"steps": 12},
        "machine": {"device": "cpu"},
        "watch": {"save_every": 3, "validate_every": 4, "validation_tokens": 500, "sample_tokens": 5},
    }
    for name, value in changes.items():
        section = next(s for s, cls in _SECTIONS.items() if name in {f.name for f in dataclasses.fields(cls)})
        fields[section][name] = value
    return TrainConfig(**{section: cls(**fields[section]) for section, cls in _SECTIONS.items()})  # type: ignore[arg-type]


def numbers(output: Path) -> list[tuple[Any, ...]]:
    """Everything in the metrics but times and starts."""
    kept = []
    for row in read_metrics(output):
        if row["event"] in ("step", "validation", "sample"):
            kept.append(tuple((k, v) for k, v in row.items() if "second" not in k))
    return kept


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(output) if row["event"] == "step"]


def tensors(output: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and AdamW's averages of a checkpoint that one rank wrote."""
    (file,) = (output / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return load_file(file)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
