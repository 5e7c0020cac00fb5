"""``efla train`` and ``efla prepare``: train a model by a recipe, here or under torchrun; tokenise text for it."""

import inspect
import json as json_format
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from efla.data.prepare import PrepareConfig
from efla.errors import refuse_ignored
from efla.train import recipes
from efla.train.config import TrainConfig
from efla.train.estimate import DEVICES, Machines, estimate

_DEFAULT = "tiny"


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a model. The default is 471,000 parameters on the bytes of Python's documentation, about a minute.

    The same command resumes from the last checkpoint in its output folder. SIGTERM saves and exits with code 75.
    Many devices: torchrun --nproc-per-node N -m efla train ... --strategy ddp|fsdp|hsdp

    To see a recipe's options and values: efla train --recipe NAME --help
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    recipe: str = _DEFAULT
    """Named config to start from; --list-recipes shows all."""
    output: Path | None = None
    """Folder for checkpoints, metrics and the model; default runs/train-RECIPE."""
    dry_run: bool = False
    """Print the configuration, the size of the model and the estimated cost, and stop."""
    list_recipes: bool = False
    """Print the names of all recipes and stop."""
    json: bool = False
    """With --dry-run: print JSON."""
    estimate_device: str = "here"
    """With --dry-run: a device to estimate for (a100, h100, ...) instead of this machine."""
    estimate_count: int | None = None
    """With --dry-run: number of devices to estimate for."""
    utilisation: float = Machines.utilisation
    """With --dry-run: share of the device's peak that training is assumed to reach."""


def train(arguments: list[str]) -> int:
    """Parse ``--recipe`` first, because its values are the defaults of all other options; then train."""
    from rich.console import Console

    from efla.train.loop import MODEL, run

    name = _recipe_name(arguments)
    if "--list-recipes" in arguments:
        print("\n".join(recipes.names()))
        return 0
    command = tyro.cli(
        TrainCommand,
        prog="efla train",
        args=arguments,
        default=TrainCommand(config=recipes.get(name), recipe=name),
        description=inspect.cleandoc(TrainCommand.__doc__ or ""),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    output = command.output or Path("runs") / f"train-{command.recipe}"
    if command.dry_run:
        return _dry_run(command, output)
    given = {
        "json": command.json, "estimate-device": command.estimate_device != "here",
        "estimate-count": command.estimate_count is not None, "utilisation": command.utilisation != Machines.utilisation,
    }  # fmt: skip
    refuse_ignored(given, "without --dry-run")
    outcome = run(command.config, output, console=Console())
    if outcome.finished and _is_main():
        prompt = command.config.watch.sample_prompt
        print(f"then: efla generate {output / MODEL} --prompt {json_format.dumps(prompt)}")
    return outcome.exit_code


def _dry_run(command: TrainCommand, output: Path) -> int:
    if command.estimate_device not in ("here", *DEVICES):
        raise ValueError(
            f"--estimate-device must be here or one of {', '.join(DEVICES)}, got {command.estimate_device!r}"
        )
    machines = Machines(command.estimate_device, command.estimate_count, command.utilisation)
    facts = {"output": str(output), **estimate(command.config, machines)}
    if not _is_main():
        return 0
    if command.json:
        print(json_format.dumps({"config": command.config.record(), "estimate": facts}, indent=2))
        return 0
    for section, options in command.config.record().items():
        print(f"{section}")
        for key, value in options.items():
            print(f"  {key:<24}{value}")
    print("estimate")
    for key, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{step}: {rate:.6g}" for step, rate in value.items())
        print(f"  {key.replace('_', ' '):<38}{shown}")
    return 0


def _recipe_name(arguments: list[str]) -> str:
    found = []
    for place, argument in enumerate(arguments):
        if argument == "--recipe":
            if place + 1 == len(arguments):
                raise ValueError(f"--recipe needs a name: {', '.join(recipes.names())}")
            found.append(arguments[place + 1])
        if argument.startswith("--recipe="):
            found.append(argument.partition("=")[2])
    if len(found) > 1:
        raise ValueError(f"--recipe was given {len(found)} times ({', '.join(found)}); give it once")
    return found[0] if found else _DEFAULT


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def prepare(
    config: Annotated[
        PrepareConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs
    ],
    output: Path,
    workers: int | None = None,
) -> int:
    """Tokenise text into packed, memory-mapped shards with checksums; then: efla train --data OUTPUT.

    The same command resumes where it stopped, and leaves a finished folder as it is. The tokens do not depend on the number
    of workers.

    Args:
        output: New folder for the shards.
        workers: Tokenising processes; default one per core, and none besides this one for bytes.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from efla.data import prepare as preparation

    if workers is None:
        workers = 1 if config.tokenizer == "bytes" else os.cpu_count() or 1
    start = time.perf_counter()
    shown = TextColumn(
        "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
    )
    with Progress(SpinnerColumn(), shown, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", documents=0, tokens=0, speed=0.0)

        def watch(*, documents: int, tokens: int, text_bytes: int) -> None:
            speed = text_bytes / 1e6 / (time.perf_counter() - start)
            progress.update(task, documents=documents, tokens=tokens, speed=speed)

        index = preparation.prepare(config, output, workers=workers, watch=watch)
    for part, shards in (("training", index.train), ("validation", index.validation)):
        tokens, documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
        print(f"{part:<10}  {tokens:,} tokens, {documents:,} documents, {len(shards)} shards")
    if index.tail:
        print(f"            of which the last {index.tail:,} tokens are kept for validation")
    if index.dropped:
        print(f"            {index.dropped:,} NUL characters were left out: byte 0 marks documents")
    print(f"vocabulary  {index.vocab_size:,} ({index.tokenizer}); then: efla train --data {output}")
    return 0
