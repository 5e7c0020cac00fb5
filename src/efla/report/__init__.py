"""Results in, one self-contained HTML page out."""

from __future__ import annotations

from efla.report.build import build

__all__ = ["build"]
