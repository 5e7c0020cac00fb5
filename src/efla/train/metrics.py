"""What happened, as JSON lines: the truth that displays and TensorBoard are copies of.

Every row has ``event`` and ``step``, the number of steps done by then:

    start       a process began (again) at that step
    step        loss (nats), norm, rate, tokens so far, seconds, tokens_per_second, applied
    validation  loss, bits_per_token, perplexity, tokens
    sample      prompt, text
    end         why: finished, SIGTERM, SIGINT
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from efla.runs.records import Record, dumps
from efla.runs.rows import write_atomically
from efla.train.output import explain_write

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends rows to ``metrics.jsonl``, and to TensorBoard's files if asked."""

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self.file = folder / METRICS
        self._stream = open(self.file, "ab")  # noqa: SIM115  (closed by close)
        self._board: Any = _board(folder / "tensorboard") if tensorboard else None

    def write(self, event: str, step: int, **values: Any) -> None:
        """One row, on disk before this returns."""
        try:
            self._stream.write((dumps({"event": event, "step": step, **values}) + "\n").encode())
            self._stream.flush()
        except OSError as error:
            raise explain_write(error, self.file) from error
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(f"{event}/{name}", value, step)
                elif event == "sample" and name == "text":
                    self._board.add_text("sample", value, step)

    def close(self) -> None:
        self._stream.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[Record]:
    """All whole rows of a run."""
    file = folder / METRICS
    if not file.exists():
        raise FileNotFoundError(f"no {METRICS} in {folder}; expected the output folder of efla train")
    return _rows(file.read_bytes())


def rewind(folder: Path, step: int) -> int:
    """Drop the rows after ``step``, from which the run goes on: they will be written again. Returns how many."""
    file = folder / METRICS
    if not file.exists():
        return 0
    data = file.read_bytes()
    rows = _rows(data)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows) or (data and not data.endswith(b"\n")):
        write_atomically(file, "".join(dumps(row) + "\n" for row in kept).encode())
    return len(rows) - len(kept)


def _rows(data: bytes) -> list[Record]:
    rows = []
    for line in data.split(b"\n")[:-1]:  # what a kill left of a last line is no row
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RuntimeError("--tensorboard needs the package tensorboard: pip install 'efla[train]'") from None
    return SummaryWriter(str(folder))
