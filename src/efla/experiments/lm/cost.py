"""What a cell cost over all its sittings: wall time and the peak of memory, kept beside its checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path

from efla.runs.memory import PeakMemory
from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically


class Cost:
    """Made when a cell starts or goes on. What was spent since the last ``keep`` of a killed sitting is lost."""

    def __init__(self, device: str, scratch: Path | None) -> None:
        self._file = None if scratch is None else scratch / "cost.json"
        there = self._file is not None and self._file.exists()
        before: Record = json.loads(self._file.read_text()) if self._file is not None and there else {}
        self._wall_seconds: float = before.get("wall_seconds", 0.0)
        self.peak_memory_growth: int | None = before.get("peak_memory_growth")
        self._clock, self._memory = time.perf_counter(), PeakMemory(device)

    @property
    def wall_seconds(self) -> float:
        return round(self._wall_seconds + time.perf_counter() - self._clock, 3)

    def note_memory(self) -> None:
        """Count the memory that this sitting has taken so far."""
        found = self._memory.growth()
        if found is not None:
            self.peak_memory_growth = max(found, self.peak_memory_growth or 0)

    def keep(self) -> None:
        """Write what the cell has cost so far into its folder, which its first checkpoint made."""
        if self._file is not None:
            record = {"wall_seconds": self.wall_seconds, "peak_memory_growth": self.peak_memory_growth}
            write_atomically(self._file, dumps(record).encode())
