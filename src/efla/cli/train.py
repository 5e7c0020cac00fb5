"""``efla train``: train a model by a recipe, here or under torchrun."""

from __future__ import annotations

import inspect
import json as json_format
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from efla.errors import refuse_ignored
from efla.train import recipes
from efla.train.config import TrainConfig
from efla.train.estimate import DEVICES, Machines, estimate

_DEFAULT = "tiny"


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a model. With nothing given: 471,000 parameters on the bytes of Python's documentation, about a minute.

    The same command again goes on from the last checkpoint of its output folder. SIGTERM saves and exits with code 75.
    Many devices: torchrun --nproc-per-node N -m efla train ... --strategy ddp|fsdp|hsdp

    Options of the recipe are shown with its values: efla train --recipe NAME --help
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    recipe: str = _DEFAULT
    """Named config to start from; --list-recipes shows all."""
    output: Path | None = None
    """Folder for checkpoints, metrics and the model; default runs/train-RECIPE."""
    dry_run: bool = False
    """Print what would be run, what it is and what it would take, and stop."""
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


def main(arguments: list[str]) -> int:
    """Read ``--recipe`` first, for its values are the defaults of all other options."""
    name = _recipe_name(arguments)
    if "--list-recipes" in arguments:
        print("\n".join(recipes.names()))
        return 0
    default = TrainCommand(config=recipes.get(name), recipe=name)
    command = tyro.cli(
        TrainCommand,
        prog="efla train",
        args=arguments,
        default=default,
        description=inspect.cleandoc(TrainCommand.__doc__ or ""),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return train(command)


def train(command: TrainCommand) -> int:
    """Run a command line that was read."""
    from rich.console import Console

    from efla.train.loop import MODEL, run

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
