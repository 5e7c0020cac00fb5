"""A run is a grid of independent cells; each finished cell is written at once, and starting again does the rest."""

from __future__ import annotations

from efla.experiments.framework.experiment import Cell, Experiment, Record, Report
from efla.experiments.framework.folder import RunFolder
from efla.experiments.framework.runner import RunSummary, run

__all__ = ["Cell", "Experiment", "Record", "Report", "RunFolder", "RunSummary", "run"]
