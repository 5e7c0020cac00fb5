"""``efla reproduce EXPERIMENT``: run an experiment's grid, draw its figures, print its table; ``all`` runs every one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from efla import experiments
from efla.experiments.exactness.options import Exactness
from efla.experiments.lm.options import Lm
from efla.experiments.mad.options import Mad
from efla.experiments.runner import run
from efla.experiments.smnist.options import Lr, Smnist
from efla.experiments.throughput.options import Throughput
from efla.runs.rows import ROWS, read_rows

Executor = Literal["process", "inline", "ray"]


@dataclass(frozen=True, kw_only=True)
class All:
    """Every experiment with the same profile, and one report on all of them."""

    profile: Literal["quick", "full"] = "quick"
    """quick: minutes for each experiment; full: hours for most of them, resumable."""
    data: str | None = None
    """Folder with the data sets (mnist/, corpus/, lambada/, wikitext-2/, eval/); default: EFLA_DATA, else embedded data."""

    def options(self) -> list[Any]:
        """The experiments in the order in which they are run: what measures time first, while the machine is cool."""
        has_data = bool(self.data or os.environ.get("EFLA_DATA"))
        return [
            Exactness(profile=self.profile),
            Throughput(profile=self.profile),
            Smnist(profile=self.profile, data=self.data),
            Lr(profile=self.profile, data=self.data),
            Mad(profile=self.profile),
            Lm(profile=self.profile, data=self.data, corpus=None if has_data else "python-docs"),
        ]


@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def reproduce(
    experiment: Annotated[
        Annotated[Exactness, tyro.conf.subcommand("exactness", prefix_name=False)]
        | Annotated[Smnist, tyro.conf.subcommand("smnist", prefix_name=False)]
        | Annotated[Mad, tyro.conf.subcommand("mad", prefix_name=False)]
        | Annotated[Lm, tyro.conf.subcommand("lm", prefix_name=False)]
        | Annotated[Throughput, tyro.conf.subcommand("throughput", prefix_name=False)]
        | Annotated[Lr, tyro.conf.subcommand("lr", prefix_name=False)]
        | Annotated[All, tyro.conf.subcommand("all", prefix_name=False)],
        tyro.conf.arg(name=""),
    ],
    output: Path | None = None,
    workers: int = 2,
    threads: int | None = None,
    executor: Executor = "process",
) -> int:
    """Run an experiment. Finished cells are kept: the same command continues where the last one stopped.

    Args:
        experiment: which experiment, with its own options.
        output: folder for rows and figures; default runs/EXPERIMENT-PROFILE (smnist and lr share theirs). For all: the
            folder of those folders, default runs.
        workers: processes that run cells side by side; throughput always takes one.
        threads: threads of each of them, default 1 (throughput: all cores); the rows depend on it in the last digits.
        executor: process: worker processes; inline: this process; ray: a Ray cluster (RAY_ADDRESS, else a local one).
    """

    def run_one(options: Any, folder: Path | None) -> Path:
        return _run(options, folder, workers=workers, threads=threads, executor=executor)

    if isinstance(experiment, All):
        return _run_all(experiment, output or Path("runs"), run_one)
    print(f"report   efla report {run_one(experiment, output)}")
    return 0


def _run(options: Any, output: Path | None, *, workers: int, threads: int | None, executor: Executor) -> Path:
    """Run one experiment and print what it showed; returns its folder."""
    name = _name(options)
    cls = experiments.get(name)
    folder = output or Path("runs") / f"{cls.folder_name()}-{options.profile}"
    if threads is None:
        threads = 1 if cls.side_by_side else os.cpu_count() or 1
    # The exactness study is over before a worker would have started.
    how = "inline" if name == "exactness" and executor == "process" else executor
    run(
        cls(options.config()),
        folder,
        executor=how,
        workers=workers if cls.side_by_side else 1,
        threads=threads,
        console=Console(stderr=True),
    )
    rows = read_rows(folder)
    print(cls.text_summary(rows))
    print(f"\nrows     {folder / ROWS}", flush=True)
    for file in cls.plot(rows, folder):
        print(f"figure   {file}")
    return folder


def _run_all(every: All, root: Path, run_one: Callable[[Any, Path | None], Path]) -> int:
    """Run every experiment into a folder of its own, and report on all that has rows; one that fails does not stop the rest.

    What cannot run, for want of data, is told before the first one starts.
    """
    from efla.report.page import build

    folders: list[Path] = []
    failures: dict[str, Exception] = {}
    runnable: list[Any] = []
    for options in every.options():
        try:
            options.config()
            runnable.append(options)
        except (RuntimeError, ValueError, OSError) as error:
            failures[_name(options)] = error
            print(f"{_name(options)} cannot run: {error}", flush=True)
    for options in runnable:
        cls = experiments.get(_name(options))
        print(f"\n== {cls.title} ==", flush=True)
        folder = root / f"{cls.folder_name()}-{every.profile}"
        try:
            run_one(options, folder)
        except (RuntimeError, ValueError, OSError) as error:
            failures[_name(options)] = error
            print(f"{_name(options)} failed: {error}", flush=True)
        if folder not in folders and (folder / ROWS).exists() and read_rows(folder):
            folders.append(folder)
    if folders:
        page = root / f"report-{every.profile}.html"
        build(folders, page)
        print(f"\nreport   {page.resolve()}")
    if failures:
        print(
            "not run, or in part: "
            + "; ".join(f"{name} ({str(error).splitlines()[0]})" for name, error in failures.items())
        )
    return 1 if failures else 0


def _name(options: Any) -> str:
    """The experiment whose options these are."""
    return type(options).__name__.lower()
