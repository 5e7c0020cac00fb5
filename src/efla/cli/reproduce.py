"""``efla reproduce EXPERIMENT``: run an experiment's grid, draw its figures, print its table; ``all`` runs every one."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro
from rich.console import Console

from efla.experiments import registry
from efla.experiments.experiment import Options
from efla.experiments.runner import run
from efla.runs.rows import ROWS, read_rows

Executor = Literal["process", "inline", "ray"]


@dataclass(frozen=True, kw_only=True)
class All:
    """Every experiment with the same profile, and one report on all of them."""

    profile: Literal["quick", "full"] = "quick"
    """quick: minutes for each experiment; full: hours for most of them, resumable."""
    data: str | None = None
    """Folder with the data sets (mnist/, corpus/, lambada/, wikitext-2/, eval/); default: EFLA_DATA, else embedded data."""

    def options(self) -> list[Options]:
        """The options of all experiments, in the order in which they run."""
        return [registry.options_class(name).for_all(self.profile, self.data) for name in registry.names()]


if TYPE_CHECKING:
    Choice = Any
else:
    _CLASSES = {**{name: registry.options_class(name) for name in registry.names()}, "all": All}
    Choice = Union[  # noqa: UP007 (made from a tuple)
        tuple(Annotated[cls, tyro.conf.subcommand(name, prefix_name=False)] for name, cls in _CLASSES.items())
    ]


@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def reproduce(
    experiment: Annotated[Choice, tyro.conf.arg(name="")],
    output: Path | None = None,
    workers: int = 2,
    threads: int | None = None,
    executor: Executor = "process",
) -> int:
    """Run an experiment. Finished cells are saved; the same command resumes after an interruption.

    Args:
        experiment: which experiment, with its own options.
        output: folder for rows and figures; default runs/EXPERIMENT-PROFILE (smnist and lr share theirs). For all: the
            folder of those folders, default runs.
        workers: processes that run cells side by side; throughput always uses one.
        threads: threads of each process, default 1 (throughput: all cores); the rows depend on it in the last digits.
        executor: process: worker processes; inline: this process; ray: a Ray cluster (RAY_ADDRESS, else a local one).
    """

    def run_one(options: Options, folder: Path | None) -> Path:
        return _run(options, folder, workers=workers, threads=threads, executor=executor)

    if isinstance(experiment, All):
        return _run_all(experiment, output or Path("runs"), run_one)
    print(f"report   efla report {run_one(experiment, output)}")
    return 0


def _run(options: Any, output: Path | None, *, workers: int, threads: int | None, executor: Executor) -> Path:
    """Run one experiment and print its summary; returns its folder."""
    cls = registry.get(registry.name_of(options))
    folder = output or Path("runs") / f"{cls.folder_name()}-{options.profile}"
    if threads is None:
        threads = 1 if cls.side_by_side else os.cpu_count() or 1
    run(
        cls(options.config()),
        folder,
        executor="inline" if cls.in_process and executor == "process" else executor,
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


def _run_all(every: All, root: Path, run_one: Callable[[Options, Path | None], Path]) -> int:
    """Run every experiment into a folder of its own and report on all that have rows. A failure does not stop the rest.

    Experiments whose data is missing are reported before the first one starts.
    """
    from efla.report.page import build

    folders: list[Path] = []
    failures: dict[str, Exception] = {}
    runnable: dict[str, Options] = {}
    for options in every.options():
        name = registry.name_of(options)
        try:
            options.config()
            runnable[name] = options
        except (RuntimeError, ValueError, OSError) as error:
            failures[name] = error
            print(f"{name} cannot run: {error}", flush=True)
    for name, options in runnable.items():
        cls = registry.get(name)
        print(f"\n== {cls.title} ==", flush=True)
        folder = root / f"{cls.folder_name()}-{every.profile}"
        try:
            run_one(options, folder)
        except (RuntimeError, ValueError, OSError) as error:
            failures[name] = error
            print(f"{name} failed: {error}", flush=True)
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
