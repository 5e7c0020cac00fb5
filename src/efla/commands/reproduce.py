"""``efla reproduce EXPERIMENT``: run an experiment's grid, draw its figures, print its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from efla import experiments
from efla.experiments.exactness.options import Exactness
from efla.experiments.framework import run
from efla.experiments.framework.rows import read_rows
from efla.experiments.lm.options import Lm
from efla.experiments.mad.options import Mad
from efla.experiments.smnist_robustness.options import Lr, Smnist


@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def reproduce(
    experiment: Annotated[
        Annotated[Exactness, tyro.conf.subcommand("exactness", prefix_name=False)]
        | Annotated[Smnist, tyro.conf.subcommand("smnist", prefix_name=False)]
        | Annotated[Mad, tyro.conf.subcommand("mad", prefix_name=False)]
        | Annotated[Lm, tyro.conf.subcommand("lm", prefix_name=False)]
        | Annotated[Lr, tyro.conf.subcommand("lr", prefix_name=False)],
        tyro.conf.arg(name=""),
    ],
    output: Path | None = None,
    workers: int = 2,
    threads: int = 1,
    executor: Literal["process", "inline", "ray"] = "process",
) -> int:
    """Run an experiment. Finished cells are kept: the same command continues where the last one stopped.

    Args:
        experiment: which experiment, with its own options.
        output: folder for rows and figures; default runs/EXPERIMENT-PROFILE (smnist and lr share theirs).
        workers: processes that run cells side by side.
        threads: threads of each of them; the rows depend on it in the last digits.
        executor: process: worker processes; inline: this process; ray: a Ray cluster (RAY_ADDRESS, else a local one).
    """
    name = type(experiment).__name__.lower()
    cls = experiments.get(name)
    folder = output or Path("runs") / f"{cls.folder_name()}-{experiment.profile}"
    console = Console(stderr=True)
    # The exactness study is over before a worker would have started.
    how = "inline" if name == "exactness" and executor == "process" else executor
    run(cls(experiment.config()), folder, executor=how, workers=workers, threads=threads, console=console)
    rows = read_rows(folder)
    files = cls.plot(rows, folder)
    print(cls.text_summary(rows))
    print("\n".join(["", f"rows     {folder / 'rows.jsonl'}", *(f"figure   {file}" for file in files)]))
    print(f"report   efla report {folder}")
    return 0
