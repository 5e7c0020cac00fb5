"""``efla train`` and ``efla prepare``: train a model by a recipe, here or under torchrun; tokenise text for it."""

import argparse
import inspect
import json as json_format
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from efla.data.prepare import PrepareConfig
from efla.errors import refuse_ignored
from efla.train import recipes
from efla.train.config import TrainConfig
from efla.train.estimate import Machines, estimate
from efla.train.output import si

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
    """Folder for checkpoints, metrics and the model (default: runs/train-RECIPE)."""
    quiet: bool = False
    """Print nothing but errors."""
    list_recipes: bool = False
    """Print the names of all recipes and stop."""
    dry_run: bool = False
    """Print the size of the model, the estimated cost and whether it fits the device, and stop."""
    json: bool = False
    """With --dry-run: print the config and the estimate as JSON."""
    verbose: bool = False
    """With --dry-run: also print the config."""
    machines: Machines = field(default_factory=Machines)


def train(arguments: list[str]) -> int:
    """Parse ``--recipe`` first, because its values are the defaults of all other options; then train."""
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
    given = {"json": command.json, "verbose": command.verbose}
    given |= {"estimate-device, --estimate-count or --utilisation": command.machines != Machines()}
    refuse_ignored(given, "without --dry-run")
    from rich.console import Console

    from efla.train.loop import run
    from efla.train.section import save_curve

    outcome = run(command.config, output, console=None if command.quiet else Console())
    if _is_main():
        save_curve(output)
    if outcome.finished and _is_main() and not command.quiet:
        prompt = json_format.dumps(command.config.watch.sample_prompt)
        print(f"files: {output}/ (model/, metrics.jsonl, curve.svg, checkpoints/)")
        print(f"next:  efla generate {output} --prompt {prompt}")
        print(f"       efla eval {output} --tasks paper")
    return outcome.exit_code


def _dry_run(command: TrainCommand, output: Path) -> int:
    facts = {"output": str(output), **estimate(command.config, command.machines)}
    if not _is_main():
        return 0
    if command.json:
        print(json_format.dumps({"config": command.config.record(), "estimate": facts}, indent=2))
        return 0
    for section, options in command.config.record().items() if command.verbose else ():
        print(section)
        for key, value in options.items():
            print(f"  {key:<24}{value}")
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):<38}{_shown(key, value)}")
    print("next: the same command without --dry-run")
    return 0


def _shown(key: str, value: Any) -> str:
    """A fact of the estimate as text."""
    if "flops" in key:
        return si(value, "FLOP/s" if "second" in key else "FLOP")
    if isinstance(value, dict):
        return ", ".join(f"{step}: {rate:.6g}" for step, rate in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no: use fewer --micro-rows, --gradient-checkpointing, or --strategy fsdp"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _recipe_name(arguments: list[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", action="append")
    found = parser.parse_known_args(arguments)[0].recipe or [_DEFAULT]
    if found[0] is None:
        raise ValueError(f"--recipe needs a name: {', '.join(recipes.names())}")
    if len(found) > 1:
        raise ValueError(f"--recipe was given {len(found)} times; give it once")
    return str(found[0])


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def prepare(
    config: Annotated[
        PrepareConfig, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs
    ],
    output: Path,
    workers: int | None = None,
    quiet: bool = False,
) -> int:
    """Tokenise text into packed, memory-mapped shards with checksums; then: efla train --data OUTPUT.

    The same command resumes where it stopped, and leaves a finished folder as it is. The tokens do not depend on the number
    of workers.

    Args:
        output: New folder for the shards.
        workers: Tokenising processes (default: one per core, and none besides this one for bytes).
        quiet: Print nothing but errors.
    """
    from rich.console import Console

    from efla.data import prepare as preparation
    from efla.runs.progress import Bars

    start = time.perf_counter()
    with Bars(None if quiet else Console(stderr=True)) as bars:

        def watch(*, documents: int, tokens: int, text_bytes: int) -> None:
            speed = text_bytes / 1e6 / (time.perf_counter() - start)
            text = f"{documents:,} documents, {tokens:,} tokens, {speed:.1f} MB/s"
            bars.update("tokenizing", 0, config.max_tokens or None, text)
            bars.line_now_and_then(text)

        index = preparation.prepare(config, output, workers=workers, watch=watch)
    if quiet:
        return 0
    for part, shards in (("training", index.train), ("validation", index.validation)):
        tokens, documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
        print(f"{part:<10}  {tokens:,} tokens, {documents:,} documents, {len(shards)} shards")
    if index.tail:
        print(f"            of which the last {index.tail:,} tokens are kept for validation")
    if index.dropped:
        print(f"            {index.dropped:,} NUL characters were left out: byte 0 marks documents")
    print(f"vocabulary  {index.vocab_size:,} ({index.tokenizer})")
    print(f"next: efla train --data {output}")
    return 0
