"""``efla reproduce EXPERIMENT``: run an experiment's grid, draw its figures, print its table. ``paper`` and ``all`` run several
and end in one report."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro
from rich.console import Console

from efla.experiments import registry
from efla.experiments.experiment import Options
from efla.runs.progress import clock
from efla.runs.records import Record
from efla.runs.rows import ROWS, read_rows
from efla.runs.text import claims_text
from efla.runs.vega import unavailable

Executor = Literal["process", "inline", "ray"]


@dataclass(frozen=True, kw_only=True)
class All:
    """Every experiment with the same profile, and one report on all of them."""

    profile: Literal["quick", "full"] = "quick"
    """quick: minutes for each experiment; full: hours for most of them, resumable."""
    data: str | None = None
    """Folder with the data sets (mnist/, corpus/, lambada/, wikitext-2/, eval/) (default: EFLA_DATA, else embedded data)."""

    def options(self) -> list[Options]:
        """The options of all experiments, in the order in which they run."""
        return [registry.options_class(name).for_all(self.profile, self.data) for name in registry.names()]

    def default_output(self) -> Path:
        return Path("runs")


_PAIR = ("exact-flow", "delta-l2")
_SEEDS = (42, 43, 44)
_SHORT = {"profile": "authors", "data": "embedded", "length": 196, "steps": 192}
"""The authors' classifier on images of 14 x 14 pixels: six passes over the 4,000 embedded ones."""
# Profile -> experiment -> options in place of the experiment's own.
_PAPER: dict[str, dict[str, dict[str, Any]]] = {
    "demo": {
        "exactness": {"profile": "quick"},
        "smnist": {**_SHORT, "arms": (*_PAIR, "delta-raw"), "rates": (3e-3,), "seeds": _SEEDS},
    },
    "quick": {
        "exactness": {},
        "throughput": {},
        "smnist": {**_SHORT, "arms": _PAIR, "rates": (3e-3, 1e-3), "seeds": _SEEDS[:2]},
        "lr": {**_SHORT, "arms": _PAIR, "seeds": _SEEDS[:1]},
        "mad": {"arms": _PAIR},
        "lm": {"arms": _PAIR},
    },
    "full": {
        "exactness": {},
        "throughput": {},
        "smnist": {"profile": "authors"},
        "lr": {"profile": "authors"},
        "mad": {"arms": _PAIR},
        "lm": {"arms": _PAIR},
    },
}
# Seconds of one core for a cell: from the rows of results/ (full) and from single cells (demo, quick).
_SECONDS: dict[str, dict[str, float]] = {
    "exactness": {"demo": 0.4, "quick": 0.4, "full": 0.4},
    "throughput": {"quick": 60, "full": 180},
    "smnist": {"demo": 30, "quick": 30, "full": 370},
    "lr": {"quick": 30, "full": 370},
    "mad": {"quick": 15, "full": 235},
    "lm": {"quick": 60, "full": 1860},
}


@dataclass(frozen=True, kw_only=True)
class Paper(All):
    """What two cores can show of the paper: the authors' sMNIST and its rates, the main pair on MAD and on text, exactness,
    throughput; one report."""

    profile: Literal["quick", "full", "demo"] = "quick"  # type: ignore[assignment]
    """quick: ten minutes on two quiet cores; full: about half a day, resumable; demo: three minutes, exactness and sMNIST. quick
    and demo read the embedded images."""

    def options(self) -> list[Options]:
        base: Any = "quick" if self.profile == "demo" else self.profile
        return [
            replace(registry.options_class(name).for_all(base, self.data), **changes)
            for name, changes in _PAPER[self.profile].items()
        ]

    def default_output(self) -> Path:
        return Path("runs") / "paper"


if TYPE_CHECKING:
    Choice = Any
else:
    _CLASSES = {**{name: registry.options_class(name) for name in registry.names()}, "paper": Paper, "all": All}
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
    quiet: bool = False,
    verbose: bool = False,
) -> int:
    """Run an experiment. Finished cells are saved; the same command resumes after an interruption.

    Args:
        experiment: Which experiment, with its own options.
        output: Folder for rows and figures (default: runs/EXPERIMENT-PROFILE; smnist and lr share theirs). For paper and all:
            the folder of those folders (default: runs/paper and runs).
        workers: Processes that run cells side by side; throughput always uses one.
        threads: CPU threads of each process (default: 1; throughput: all cores). The rows depend on it in the last digits.
        executor: process: worker processes; inline: this process; ray: a Ray cluster (RAY_ADDRESS, else a local one).
        quiet: Print results only, no progress.
        verbose: Print every level, comparison and file, not only a screen of them.
    """
    console = Console(stderr=True, quiet=quiet)
    run_one = partial(_run, console=console, workers=workers, threads=threads, executor=executor, verbose=verbose)
    if isinstance(experiment, All):
        return _run_all(experiment, output or experiment.default_output(), run_one, workers, verbose)
    folder = run_one(experiment, output)
    print(registry.get(registry.name_of(experiment)).text_summary(read_rows(folder), verbose))
    print(f"\nfiles: {folder}/\nnext:  efla report {folder}")
    return 0


def _run(
    options: Any,
    output: Path | None,
    *,
    console: Console,
    workers: int,
    threads: int | None,
    executor: Executor,
    verbose: bool,
) -> Path:
    """Run one experiment and draw its figures; returns its folder."""
    from efla.experiments.runner import run

    cls = registry.get(registry.name_of(options))
    folder = output or Path("runs") / f"{cls.folder_name()}-{options.profile}"
    if no_figures := unavailable():
        print(f"no figures: {no_figures}", flush=True)
    if threads is None:
        threads = 1 if cls.side_by_side else os.cpu_count() or 1
    run(
        cls(options.config()),
        folder,
        executor="inline" if cls.in_process and executor == "process" else executor,
        workers=workers if cls.side_by_side else 1,
        threads=threads,
        console=console,
    )
    for file in () if no_figures else cls.plot(read_rows(folder), folder):
        if verbose:
            print(f"figure   {file}")
    return folder


def _run_all(
    every: All, root: Path, run_one: Callable[[Options, Path | None], Path], workers: int, verbose: bool
) -> int:
    """Run experiments into folders of their own and report on all that have rows. A failure does not stop the rest.

    Experiments whose data is missing are reported before the first one starts.
    """
    from efla.report.page import build

    folders: dict[Path, str] = {}
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
    if isinstance(every, Paper):
        print(_cost(every.profile, root, runnable, workers), flush=True)
    for name, options in runnable.items():
        cls = registry.get(name)
        folder = _folder(root, name, every.profile)
        try:
            run_one(options, folder)
        except (RuntimeError, ValueError, OSError) as error:
            failures[name] = error
            print(f"{name} failed: {error}", flush=True)
        if (folder / ROWS).exists() and (rows := read_rows(folder)):
            folders.setdefault(folder, name)
            if verbose:
                print(f"\n== {cls.title} ==\n{cls.text_summary(rows, verbose)}", flush=True)
    if folders:
        page = root / f"report-{every.profile}.html"
        sections = build(list(folders), page)
        for section in sections:
            print(f"\n{section.title}")
            # A demonstration has room for its table.
            if isinstance(every, Paper) and every.profile == "demo" and section.key == "smnist":
                print(registry.get("smnist").text_summary(read_rows(_folder(root, "smnist", every.profile)), verbose))
            else:
                print("\n".join(claims_text(section.claims, verbose)))
        print("\nPositive differences favour EFLA: mean over paired seeds [95 % interval].")
        print(f"report   {page.resolve()}\nnext     open it in a browser; efla explain shows the method as a page")
    if failures:
        print(
            "not run, or in part: "
            + "; ".join(f"{name} ({str(error).splitlines()[0]})" for name, error in failures.items())
        )
    return 1 if failures else 0


def _folder(root: Path, name: str, profile: str) -> Path:
    return root / f"{registry.get(name).folder_name()}-{profile}"


def _cost(profile: str, root: Path, runnable: dict[str, Options], workers: int) -> str:
    """What is left to run, and about how long it takes on quiet cores."""
    parts, total = [], 0.0
    counted: set[tuple[Path, str]] = set()
    for name, options in runnable.items():
        folder = _folder(root, name, profile)
        rows: list[Record] = read_rows(folder) if (folder / ROWS).exists() else []
        counted |= {(folder, str(row["cell"])) for row in rows if row["row"] == "cell"}
        left = {(folder, cell.id) for cell in registry.get(name)(options.config()).cells()} - counted
        counted |= left
        seconds = len(left) * _SECONDS[name][profile] / min(workers, os.cpu_count() or 1)
        total += seconds
        parts.append(f"{name} {len(left)} runs, {clock(seconds)}")
    return f"To run on {workers} quiet cores, about {clock(total)} in all: " + "; ".join(parts)
