"""Expected duration of cells, from a few training steps timed now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from efla.data import corpora
from efla.experiments.experiment import Cell
from efla.experiments.lm.config import LmConfig
from efla.experiments.lm.measure import CHOICE_TASKS, POSITIONS
from efla.experiments.lm.train import build, optimizer_of
from efla.runs.timing import seconds_per_call
from efla.train.engine import Engine
from efla.train.step import train_step

_FORWARD = 0.32
"""Forward pass as a share of a training step."""
# Bytes of the test sets, roughly: WikiText's articles, a LAMBADA passage, a question with its choices.
_WIKITEXT, _PASSAGE, _QUESTION, _PASSAGES = 1_290_000, 330, 500, 5_153


def seconds_per_byte(config: LmConfig, arm: str, threads: int) -> float:
    """Time of a training step over its bytes."""
    model = build(config, arm, 0)
    optimizer = optimizer_of(config, model)
    rows = torch.randint(1, 256, (config.rows, config.length), generator=torch.Generator().manual_seed(0))
    step = partial(train_step, model, optimizer, [rows], rate=1e-4, engine=Engine.alone(config.device))
    return seconds_per_call(step, threads) / config.bytes_per_step


def scored_bytes(config: LmConfig, seed: int) -> float:
    """Bytes that a cell reads in forward passes."""
    corpus = corpora.load(config.corpus, config.folder)
    test = len(corpus.test) if config.test_bytes is None else min(config.test_bytes, len(corpus.test))
    validation = min(config.final_validation_bytes or len(corpus.validation), len(corpus.validation))
    total = test + validation + config.steps / config.validate_every * config.validation_bytes
    total += min(config.position_rows * POSITIONS * config.length, len(corpus.test))
    if config.downstream:
        total += _WIKITEXT if config.wikitext_items is None else config.wikitext_items * _WIKITEXT / 62
        total += min(config.lambada_items or _PASSAGES, _PASSAGES) * _PASSAGE
        total += config.choice_items * len(CHOICE_TASKS) * _QUESTION * (seed == config.choice_seed)
    return total


def expected_seconds(config: LmConfig, cells: Sequence[Cell], threads: int) -> list[float]:
    """Upper estimate for each cell; finished parts of an earlier run are not subtracted."""
    arms = dict.fromkeys(cell.settings["arm"] for cell in cells)
    pace = {arm: seconds_per_byte(config, arm, threads) for arm in arms}
    trained = config.steps * config.bytes_per_step
    return [
        pace[cell.settings["arm"]] * (trained + _FORWARD * scored_bytes(config, cell.settings["seed"]))
        for cell in cells
    ]
