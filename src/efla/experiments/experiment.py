"""What an experiment is: a typed config, a grid of cells, and a function that runs one cell and returns its rows."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from efla.errors import check_names
from efla.models import presets
from efla.runs.names import name_of
from efla.runs.records import GRID, Record, check_fields, protocol_of

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from efla.runs.sections import Section

C = TypeVar("C")


@dataclass(frozen=True)
class Cell:
    """One independent piece of work. ``settings`` are the values that distinguish it from the other cells of the grid."""

    settings: Record

    @property
    def id(self) -> str:
        """A name that is the same in every run: ``arm=exact-flow rate=0.003 seed=0``."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def label(self) -> str:
        """The same for people: ``EFLA rate=0.003 seed=0``."""
        shown = (name_of(value) if key == "arm" else f"{key}={value}" for key, value in self.settings.items())
        return " ".join(shown)


class Group(NamedTuple):
    """A product of values. A grid is a tuple of groups."""

    arms: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    decays: tuple[float, ...] = (0.0,)
    settings: tuple[str, ...] = ("",)
    """What the arms are compared on: a block of sMNIST, ``task/name`` of MAD."""


def grid_cells(groups: Iterable[Group], axes: Sequence[str], settings: Callable[..., Record]) -> list[Cell]:
    """The cells of all groups in order, without repeats.

    axes: fields of a group, outermost loop first. settings: maps one value per axis to the settings of a cell.
    """
    found: dict[str, Cell] = {}
    for group in groups:
        for values in itertools.product(*(getattr(group, axis) for axis in axes)):
            cell = Cell(settings(*values))
            found.setdefault(cell.id, cell)
    return list(found.values())


def restrict_grid(groups: Sequence[Group], asked: Mapping[str, Any], otherwise: Group) -> tuple[Group, ...]:
    """The part of a grid with the values asked for; if it lacks one of their combinations, ``otherwise`` with the values.

    asked: field of a group -> values.
    """

    def has(combination: tuple[Any, ...]) -> bool:
        pairs = list(zip(asked, combination, strict=True))
        return any(all(value in getattr(group, axis) for axis, value in pairs) for group in groups)

    if not all(map(has, itertools.product(*asked.values()))):
        return (otherwise._replace(**asked),)
    narrowed = (
        group._replace(**{axis: tuple(v for v in getattr(group, axis) if v in asked[axis]) for axis in asked})
        for group in groups
    )
    return tuple(group for group in narrowed if all(group))


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """Base class of configs whose cells are arms x rates x seeds."""

    known_arms: ClassVar[Iterable[str]]
    backend: str = "auto"
    groups: tuple[Group, ...] = field(metadata=GRID)
    folder: str | None = field(default=None, metadata=GRID)
    """Where the data files are on this machine."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(Group(*group) for group in self.groups))
        check_fields(self)
        for group in self.groups:
            check_names("arm", group.arms, self.known_arms)
            if any(rate <= 0 for rate in group.rates):
                raise ValueError(f"learning rates must be positive, got {group.rates}")
            if any(decay < 0 for decay in group.decays):
                raise ValueError(f"weight decays must not be negative, got {group.decays}")


def shuffled_batches(seed: int, count: int, batch: int, *, drop_last: bool = False) -> Iterator[tuple[int, Tensor]]:
    """Endless (epoch, indices of a batch). The order of an epoch depends only on (seed, epoch), so it is equal for all arms.

    The last batch of an epoch may be smaller; ``drop_last`` leaves it out.
    """
    import torch

    for epoch in itertools.count():
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(count))
        for indices in order.split(batch):
            if len(indices) == batch or not drop_last:
                yield epoch, indices


class Report(Protocol):
    """Reports the progress of a cell: ``report(0.4, loss=1.2)``."""

    def __call__(self, fraction: float, **values: float) -> None: ...


class Work(NamedTuple):
    """The work of a cell: how often it runs a step. Steps of one name are timed once."""

    steps: float
    step: str
    build: Callable[[], Callable[[], object]]


class Experiment(ABC, Generic[C]):
    """Base class of experiments. A subclass states its name and config class, lists its cells and runs one.

    ``claims.py`` and ``section.py`` beside the subclass's module turn rows into text and into sections of the report.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    claim: ClassVar[str] = ""
    """The paper's claim in one sentence, for reports without rows of the experiment."""
    places: ClassVar[Mapping[str, str]] = {}
    """Letter of a claim -> where the paper makes it. The front page of the report shows claims that have a place."""
    config_class: ClassVar[type[Any]]
    """A frozen dataclass of JSON values; fields with metadata ``GRID`` choose cells and may differ within a folder."""
    side_by_side: ClassVar[bool] = True
    """Whether cells may run at the same time. Cells that measure time run one after another with all cores."""
    in_process: ClassVar[bool] = False
    """Whether cells are so short that they run in the calling process unless another executor is requested."""

    def __init__(self, config: C) -> None:
        self.config = config

    @classmethod
    def folder_name(cls) -> str:
        """Experiments that read the same cells share a folder, and so this name."""
        return cls.name

    def protocol(self) -> Record:
        """The part of the config that must not change within an output folder."""
        return protocol_of(self.config)

    @abstractmethod
    def cells(self) -> list[Cell]:
        """The grid, in the order in which it is run."""

    @abstractmethod
    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        """Run one cell. Returns its rows; the last one (``"row": "cell"``) summarises it and marks it as finished."""

    def prepare(self) -> None:
        """Check what all cells need, such as data files, once before any worker starts; raise an error if it is missing."""
        return None

    def with_output(self, output: Path) -> Self:
        """The same experiment with its output folder, for experiments that keep unfinished cells there."""
        return self

    def clean_up(self, cell: Cell) -> None:
        """Remove the temporary files of a cell; called when its rows are on disk."""
        return None

    @property
    def gpus_per_cell(self) -> float:
        """GPUs that a cell requests from a Ray cluster; a fraction if several cells fit on one."""
        on_gpu = getattr(self.config, "device", "cpu").startswith("cuda")
        return getattr(self.config, "gpu_share", 1.0) if on_gpu else 0.0

    def work(self, cell: Cell) -> Work | None:
        """An upper estimate of the work of a cell; ``None`` if unknown."""
        return None

    def expected_seconds(self, cells: Sequence[Cell], threads: int) -> list[float] | None:
        """An upper estimate of the time of each cell, from steps timed now; ``None`` if unknown."""
        import torch

        from efla.runs.timing import seconds_per_call

        if self.gpus_per_cell and not torch.cuda.is_available():
            return None  # the cells run on another machine
        found, timed = [], dict[str, float]()
        for cell in cells:
            work = self.work(cell)
            if work is None:
                return None
            if work.step not in timed:
                timed[work.step] = seconds_per_call(work.build(), threads)
            found.append(work.steps * timed[work.step])
        return found

    @classmethod
    def plot(cls, rows: Sequence[Record], folder: Path) -> list[Path]:
        """Draw the figures of the experiment's own sections from rows; returns the files written."""
        from efla.runs.vega import save_all

        own = [section for section in cls.sections(rows, str(folder)) if section.key == cls.name]
        return save_all((figure for section in own for figure in section.figures), folder)

    @classmethod
    def text_summary(cls, rows: Sequence[Record], verbose: bool = False) -> str:
        """The summary that the terminal shows at the end, from rows: about a screen, unless verbose."""
        return str(cls._sibling("claims", "text_summary", "")(rows, verbose))

    @classmethod
    def sections(cls, rows: Sequence[Record], source: str) -> list[Section]:
        """The experiment's sections of the report, from rows. source: the folder of the rows."""
        return list(cls._sibling("section", "sections", ())(rows, source))

    @classmethod
    def _sibling(cls, module: str, function: str, otherwise: object) -> Callable[..., Any]:
        """A function of a module in the experiment's own folder; without that module, one that returns ``otherwise``."""
        package = cls.__module__.rpartition(".")[0]
        if not package or importlib.util.find_spec(f"{package}.{module}") is None:
            return lambda *_: otherwise
        found: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{module}"), function)
        return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of the command-line options of an experiment."""

    profile: str = "quick"

    def __post_init__(self) -> None:
        """Arms may be given by the names of their models; configs and rows have the keys."""
        if arms := getattr(self, "arms", None):
            object.__setattr__(self, "arms", tuple(map(presets.arm_of, arms)))

    def config(self) -> Any:
        """The resolved config."""
        raise NotImplementedError

    @classmethod
    def for_all(cls, profile: Any, data: str | None) -> Self:
        """The options for ``efla reproduce all`` with this profile and data folder."""
        return cls(profile=profile)

    def given(self, *names: str) -> dict[str, Any]:
        """The named options that are neither ``None`` nor empty."""
        return {name: value for name in names if (value := getattr(self, name)) not in (None, ())}


@dataclass(frozen=True, kw_only=True)
class GridOptions(Options):
    """Options of the experiments on arms x rates x seeds."""

    rates: tuple[float, ...] | None = None
    """Learning rates to run instead of the profile's."""
    seeds: tuple[int, ...] | None = None
    """Seeds to run instead of the profile's."""
    steps: int | None = None
    """Optimizer steps instead of the profile's budget; recorded in the rows."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""


@dataclass(frozen=True)
class Event:
    """What happened to a cell: "started", "progress", "finished" (with rows) or "failed" (with a message)."""

    kind: str
    cell: Cell
    fraction: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    rows: list[Record] = field(default_factory=list)
    message: str = ""


def execute(experiment: Experiment[Any], cell: Cell, report: Report, threads: int) -> list[Record]:
    """Run one cell with the given number of threads. Its last row gets config, versions, threads, commit and wall time."""
    import torch

    from efla.runs import provenance

    torch.set_num_threads(threads)
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.perf_counter()
    rows = experiment.run_cell(cell, report)
    wall_seconds = round(time.perf_counter() - clock, 3)
    if not rows:
        raise RuntimeError(f"cell '{cell.id}' returned no rows")
    stamped = [{"row": row.get("row", "point"), "cell": cell.id, **cell.settings, **row} for row in rows]
    if any(row["row"] == "cell" for row in stamped[:-1]):
        raise RuntimeError(f'only the last row of cell \'{cell.id}\' may have "row": "cell"')
    stamped[-1] |= {
        "row": "cell",
        "rows": len(stamped),
        "experiment": experiment.name,
        "config": experiment.protocol(),
        "threads": threads,
        **provenance.stamp(),
        "started": started.isoformat(timespec="seconds"),
        "wall_seconds": stamped[-1].get("wall_seconds", wall_seconds),  # resumed cells count their earlier time too
    }
    return stamped
