"""A training step of the full-profile model compared with transformers models of its size, and the overhead around it."""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from efla import EflaConfig, EflaForCausalLM
from efla.bench import Suite, random_tokens, sgemm
from efla.bench.models import llama_model, parameter_counts
from efla.bench.qwen import qwen_model
from efla.data import corpora
from efla.data.prepare import PrepareConfig, prepare
from efla.models import presets
from efla.models.accounting import flops_per_token
from efla.runs.timing import Measurement, compare, training_step
from efla.train import loop, recipes
from efla.train.config import TrainConfig
from efla.train.engine import Engine
from efla.train.optimizer import build_optimizer, set_rate
from efla.train.step import num_labels, row_loss, train_step

ROWS, LENGTH, PROFILE = 8, 512, "full"
SGEMM_SIZE = 1024
LOOP_STEPS = 8
PREPARE_MEGABYTES = 32


def step(rounds: int) -> Iterator[list[Measurement]]:
    """One AdamW step on 8 rows of 512 bytes: our arms, one of them on plain torch, transformers models, and sgemm."""
    torch.manual_seed(0)
    contenders: dict[str, tuple[Callable[[EflaConfig], Any], EflaConfig]] = {
        "efla": (EflaForCausalLM, presets.arm("exact-flow", PROFILE)),
        "efla on chunked": (EflaForCausalLM, presets.arm("exact-flow", PROFILE, backend="chunked")),
        "gated delta": (EflaForCausalLM, presets.arm("gated-delta", PROFILE)),
        "transformers Qwen3.5 (gated delta)": (qwen_model, presets.arm("gated-delta", PROFILE)),
        "transformers Llama (softmax)": (llama_model, presets.arm("attention", PROFILE)),
    }
    models = {name: make(config) for name, (make, config) in contenders.items()}
    rows = random_tokens(256, ROWS, LENGTH)
    calls = {name: _step_call(model, rows) for name, model in models.items()}
    product, flops = sgemm(SGEMM_SIZE)
    # Useful work is three forward passes, whose scan counts 6 K V flops per token and head; a softmax model has a count of
    # its own.
    for name, (_, config) in contenders.items():
        flops[name] = 3.0 * flops_per_token(config, LENGTH // 2) * ROWS * LENGTH
    work = f"training step, {ROWS} rows of {LENGTH} bytes (parameters: {parameter_counts(models)})"
    measured = compare(work, {**calls, **product}, rounds=rounds, flops_of=flops)
    for m in measured:
        if m.contender != "sgemm":
            print(f"{m.contender}: {ROWS * LENGTH / m.median:,.0f} tokens/s")
    yield measured


def surroundings(rounds: int) -> Iterator[list[Measurement]]:
    """Forward and backward alone, with clipping and AdamW, and in the training loop with data, metrics and display."""
    config = recipes.get(f"exact-flow-{PROFILE}")
    config = TrainConfig(
        model=config.model,
        data=replace(config.data, data="python-docs", rows=ROWS, length=LENGTH),
        optimizer=replace(config.optimizer, steps=1_000_000),
        watch=replace(config.watch, save_every=0, validate_every=0, sample_tokens=0),
    )
    rows = random_tokens(256, ROWS, LENGTH)
    bare, stepped = (EflaForCausalLM(config.model_config()) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            "forward and backward": _repeat(_backward_call(bare, rows)),
            "with clipping and AdamW": _repeat(_step_call(stepped, rows)),
            "the whole loop": _loop_call(config, Path(folder)),
        }
        work = f"{LOOP_STEPS} training steps, {ROWS} rows of {LENGTH} bytes"
        measured = compare(work, calls, rounds=rounds)
    _, stepping, whole = measured
    print(f"share of the loop outside forward, backward and optimizer: {1 - stepping.median / whole.median:.1%}")
    yield measured


def preparing(rounds: int) -> Iterator[list[Measurement]]:
    """JSON lines to byte shards, in one process."""
    texts = corpora.load("python-docs").train.tobytes().decode(errors="replace").split("\0")[1:]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.jsonl"
        size = 0
        with open(source, "w") as stream:
            while size < PREPARE_MEGABYTES * 1e6:
                for text in texts:
                    stream.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
        runs = iter(range(1_000_000))

        def call() -> object:
            return prepare(PrepareConfig(sources=(str(source),)), Path(folder) / str(next(runs)))

        work = f"prepare {size / 1e6:.1f} MB of text as bytes"
        measured = compare(work, {"prepare": call}, threads=1, rounds=rounds)
    print(f"prepare: {size / 1e6 / measured[0].median:,.1f} MB/s in one process")
    yield measured


SUITES: dict[str, Suite] = {"step": step, "surroundings": surroundings, "preparing": preparing}


def _step_call(model: Any, rows: torch.Tensor) -> Callable[[], object]:
    optimizer = build_optimizer(model)
    if isinstance(model, EflaForCausalLM):
        return torch.enable_grad()(partial(train_step, model, optimizer, [rows], rate=1e-4))
    set_rate(optimizer, 1e-4)
    return training_step(model, optimizer, lambda: model(input_ids=rows, labels=rows, use_cache=False).loss, clip=1.0)


def _backward_call(model: Any, rows: torch.Tensor) -> Callable[[], object]:
    @torch.enable_grad()
    def call() -> object:
        model.train()
        model.zero_grad(set_to_none=True)
        return row_loss(model, rows, num_labels(rows, None)).backward()

    return call


def _loop_call(config: TrainConfig, folder: Path) -> Callable[[], object]:
    """``LOOP_STEPS`` more steps of a training run, with metrics and display."""
    run = loop.Run(config, folder, Engine.alone(), Console(quiet=True))

    @torch.enable_grad()
    def call() -> object:
        run.config = replace(config, watch=replace(config.watch, stop_after=run.step + LOOP_STEPS))
        run.saved_at = run.step + LOOP_STEPS  # so that no checkpoint is written
        return run.train()

    return call


def _repeat(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: [call() for _ in range(LOOP_STEPS)]
