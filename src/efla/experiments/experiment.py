"""What an experiment is: a typed config, a grid of cells, and a function that runs one cell and returns its rows."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from efla.runs.records import Record, protocol_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Cell", "Experiment", "Report"]

C = TypeVar("C")


@dataclass(frozen=True)
class Cell:
    """One independent piece of work. ``settings`` are the values that tell it from the other cells of the grid."""

    settings: Record

    @property
    def id(self) -> str:
        """A name that is the same in every run: ``arm=exact-flow rate=0.003 seed=0``."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())


class Report(Protocol):
    """Tells the progress display how far a cell is: ``report(0.4, loss=1.2)``."""

    def __call__(self, fraction: float, **values: float) -> None: ...


class Experiment(ABC, Generic[C]):
    """An experiment; a subclass states its name and its config class, lists cells and runs one."""

    name: ClassVar[str]
    title: ClassVar[str]
    config_class: ClassVar[type[Any]]
    """A frozen dataclass of JSON values; fields with metadata ``GRID`` choose cells and may differ within a folder."""
    side_by_side: ClassVar[bool] = True
    """Whether cells may run at the same time; those that measure time may not, and get all cores one after another."""
    claims_module: ClassVar[str] = "claims"
    plot_module: ClassVar[str] = "plot"
    """Modules of the experiment's folder that turn rows into a summary and figures."""

    def __init__(self, config: C) -> None:
        self.config = config

    @classmethod
    def folder_name(cls) -> str:
        """Experiments that read the same cells share a folder, and so this name."""
        return cls.name

    def protocol(self) -> Record:
        """What must not change within an output folder."""
        return protocol_of(self.config)

    @abstractmethod
    def cells(self) -> list[Cell]:
        """The grid, in the order in which it is worth running."""

    @abstractmethod
    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        """Run one cell. Returns its rows; the last one (``"row": "cell"``) sums it up and marks it as finished."""

    def prepare(self) -> None:
        """Check once, before any worker starts, what all cells need (data files, say); raise a clear error if absent."""
        return None

    def at(self, output: Path) -> Self:
        """The same experiment, told its output folder; one that keeps unfinished cells there says where."""
        return self

    def clean_up(self, cell: Cell) -> None:
        """Remove what a cell kept while it ran; called when its rows are on disk."""
        return None

    @property
    def gpus_per_cell(self) -> float:
        """What a cell asks of a Ray cluster; a share if several fit on one GPU."""
        return 0.0

    def expected_seconds(self, cells: Sequence[Cell], threads: int) -> list[float] | None:
        """How long each of these cells will take at most, for the estimate before the start; ``None``: nobody knows."""
        return None

    @classmethod
    def plot(cls, rows: Sequence[Record], folder: Path) -> list[Path]:
        """Draw the figures from rows alone, by ``plot`` in ``plot_module``; returns the files written."""
        module = cls._beside(cls.plot_module)
        return [] if module is None else list(module.plot(rows, folder))

    @classmethod
    def text_summary(cls, rows: Sequence[Record]) -> str:
        """What a terminal shows at the end, from rows alone (rich markup), by ``text_summary`` in ``claims_module``."""
        module = cls._beside(cls.claims_module)
        return "" if module is None else str(module.text_summary(rows))

    @classmethod
    def _beside(cls, name: str) -> ModuleType | None:
        """A module of the experiment's own folder, imported when it is needed: figures need an optional package."""
        package = cls.__module__.rpartition(".")[0]
        if not package or importlib.util.find_spec(f"{package}.{name}") is None:
            return None
        return importlib.import_module(f"{package}.{name}")
