"""A training step of the CPU protocol's full model against transformers' models of its size, and what surrounds it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from efla import EflaForCausalLM
from efla.data import corpora
from efla.data.prepare import PrepareConfig, prepare
from efla.models import presets
from efla.models.accounting import flops_per_token
from efla.runs.timing import Contender, Measurement, compare
from efla.train import loop, recipes
from efla.train.config import TrainConfig
from efla.train.optimizer import build_optimizer
from efla.train.step import num_labels, row_loss, train_step

ROWS, LENGTH, PROFILE = 8, 512, "full"
SGEMM_SIZE = 1024
LOOP_STEPS = 8
PREPARE_MEGABYTES = 32


def step(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """One AdamW step on 8 rows of 512 bytes: our arms, our arm on plain torch, transformers' models, and sgemm."""
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "efla": EflaForCausalLM(presets.arm("exact-flow", PROFILE)),
        "efla on chunked": EflaForCausalLM(presets.arm("exact-flow", PROFILE, backend="chunked")),
        "gated delta": EflaForCausalLM(presets.arm("gated-delta", PROFILE)),
        "transformers Qwen3.5 (gated delta)": gated_delta_of_transformers(),
        "transformers Llama (softmax)": softmax_of_transformers(),
    }
    rows = torch.randint(1, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    contenders = [Contender(name, _step_call(model, rows)) for name, model in models.items()]
    a = torch.randn(SGEMM_SIZE, SGEMM_SIZE)
    contenders.append(Contender("sgemm", lambda: a @ a))
    # Useful work: three times the forward pass, whose scan counts 6 K V a token and head; the same for every contender
    # would be unfair to a softmax model, whose own count is used.
    flops = {
        "efla": _flops("exact-flow"),
        "efla on chunked": _flops("exact-flow"),
        "gated delta": _flops("gated-delta"),
        "transformers Qwen3.5 (gated delta)": _flops("gated-delta"),
        "transformers Llama (softmax)": _flops("attention"),
        "sgemm": 2.0 * SGEMM_SIZE**3,
    }
    sizes = ", ".join(f"{name} {sum(p.numel() for p in model.parameters()):,}" for name, model in models.items())
    work = f"training step, {ROWS} rows of {LENGTH} bytes (parameters: {sizes})"
    measured = compare(work, contenders, threads=threads, rounds=rounds, flops_of=flops)
    for m in measured:
        if m.contender != "sgemm":
            print(f"{m.contender}: {ROWS * LENGTH / m.median:,.0f} tokens/s")
    yield measured


def surroundings(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """The same steps bare, with clipping and AdamW, and in the loop with its data, metrics and display."""
    config = recipes.get(f"exact-flow-{PROFILE}")
    config = TrainConfig(
        model=config.model,
        data=replace(config.data, data="python-docs", rows=ROWS, length=LENGTH),
        optimizer=replace(config.optimizer, steps=1_000_000),
        watch=replace(config.watch, save_every=0, validate_every=0, sample_tokens=0),
    )
    rows = torch.randint(1, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    bare, stepped = (EflaForCausalLM(config.model_config()) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        contenders = [
            Contender("forward and backward", _times(LOOP_STEPS, _backward_call(bare, rows))),
            Contender("with clipping and AdamW", _times(LOOP_STEPS, _step_call(stepped, rows))),
            Contender("the whole loop", _loop_call(config, Path(folder))),
        ]
        measured = compare(
            f"{LOOP_STEPS} training steps, {ROWS} rows of {LENGTH} bytes", contenders, threads=threads, rounds=rounds
        )
    _, stepping, whole = measured
    print(f"share of the loop outside forward, backward and optimizer: {1 - stepping.median / whole.median:.1%}")
    yield measured


def preparing(threads: int, rounds: int) -> Iterator[list[Measurement]]:
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

        measured = compare(
            f"prepare {size / 1e6:.1f} MB of text as bytes", [Contender("prepare", call)], threads=1, rounds=rounds
        )
    print(f"prepare: {size / 1e6 / measured[0].median:,.1f} MB/s in one process")
    yield measured


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {
    "step": step,
    "surroundings": surroundings,
    "preparing": preparing,
}


def gated_delta_of_transformers() -> Any:
    """Qwen3.5's text decoder, every layer a gated delta rule, at the size of our arm ``gated-delta``."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    arm: Any = presets.arm("gated-delta", PROFILE)
    heads, width = arm.num_heads, arm.head_dim
    config = Qwen3_5TextConfig(
        vocab_size=arm.vocab_size,
        hidden_size=arm.hidden_size,
        num_hidden_layers=arm.num_hidden_layers,
        intermediate_size=arm.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        layer_types=["linear_attention"] * arm.num_hidden_layers,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    return Qwen3_5ForCausalLM(config)


def softmax_of_transformers() -> Any:
    """Llama at the size of our arm ``attention``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    arm: Any = presets.arm("attention", PROFILE)
    config = LlamaConfig(
        vocab_size=arm.vocab_size,
        hidden_size=arm.hidden_size,
        num_hidden_layers=arm.num_hidden_layers,
        intermediate_size=arm.intermediate_size,
        num_attention_heads=arm.num_attention_heads,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def _flops(arm: str) -> float:
    return 3.0 * flops_per_token(presets.arm(arm, PROFILE), LENGTH // 2) * ROWS * LENGTH


def _step_call(model: Any, rows: torch.Tensor) -> Callable[[], object]:
    optimizer = build_optimizer(model)
    if isinstance(model, EflaForCausalLM):

        @torch.enable_grad()
        def call() -> object:
            return train_step(model, optimizer, [rows], rate=1e-4)
    else:

        @torch.enable_grad()
        def call() -> object:
            model.train()
            optimizer.zero_grad(set_to_none=True)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-4
            optimizer.step()
            return float(loss.detach())

    return call


def _backward_call(model: Any, rows: torch.Tensor) -> Callable[[], object]:
    @torch.enable_grad()
    def call() -> object:
        model.train()
        model.zero_grad(set_to_none=True)
        row_loss(model, rows, num_labels(rows, None)).backward()
        return None

    return call


def _loop_call(config: TrainConfig, folder: Path) -> Callable[[], object]:
    """``LOOP_STEPS`` more steps of a run, its metrics and display with it."""
    from efla.train.engine import Engine

    run = loop.Run(config, folder, Engine.alone(), Console(quiet=True))

    @torch.enable_grad()
    def call() -> object:
        run.config = replace(config, watch=replace(config.watch, stop_after=run.step + LOOP_STEPS))
        run.saved_at = run.step + LOOP_STEPS  # the loop alone: it ends without a checkpoint
        return run.train()

    return call


def _times(count: int, call: Callable[[], object]) -> Callable[[], object]:
    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated
