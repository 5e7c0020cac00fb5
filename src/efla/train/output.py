"""The output folder of a training run.

    config.json      the resolved config, the model's config, versions, git commit, machine
    metrics.jsonl    every step, validation and sample
    checkpoints/     what a run resumes from
    model/           the result, in the format of transformers
    data/            tokens of text that was not prepared before

The metrics are the source of truth; the display and TensorBoard show the same numbers. Every row has ``event`` and
``step``, the number of steps done so far:

    start       a process started or resumed at this step
    step        loss (nats), norm, rate, tokens so far, seconds, tokens_per_second, applied
    validation  loss, bits_per_token, perplexity, tokens
    sample      prompt, text
    end         why: finished, SIGTERM, SIGINT
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efla.runs import provenance
from efla.runs.folder import CONFIG, FORMAT, LOCK, lock_folder, require_same, write_config
from efla.runs.records import Record
from efla.runs.rows import JsonLog
from efla.train.config import TrainConfig

METRICS = "metrics.jsonl"


@contextmanager
def open_output(path: Path, config: TrainConfig) -> Iterator[None]:
    """Lock a new folder, or one of a run with the same config, while the context lasts."""
    with lock_folder(path):
        if (path / CONFIG).exists():
            try:
                there = json.loads((path / CONFIG).read_text())["fixed"]
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"{path / CONFIG} is not the config of a training run ({error}); choose another --output"
                ) from error
            check_resumable(there, config, path)
        else:
            others = sorted(file.name for file in path.iterdir() if file.name != LOCK)
            if others:
                raise ValueError(
                    f"{path} holds {', '.join(others[:3])} but no {CONFIG} of a run; nothing was changed. "
                    "Choose another --output"
                )
            record = {
                "format": FORMAT,
                "config": config.record(),
                "fixed": config.resume_key(),
                "model": json.loads(config.model_config().to_json_string()),
                "versions": provenance.versions(),
                "commit": provenance.git_commit(),
                "machine": provenance.machine(),
            }
            write_config(path, record)
        yield


def check_resumable(there: Record, config: TrainConfig, path: Path) -> None:
    """Raise an error if a run with the resume key ``there`` cannot resume with this config."""
    require_same(there, config.resume_key(), f"{path} holds a run with another config")


class MetricsLog:
    """Appends rows to ``metrics.jsonl``, and optionally to TensorBoard's files.

    Opening it drops the rows after ``step``, where the run resumes: they are computed again.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        self._log = JsonLog(folder / METRICS)
        if self._log.file.exists():
            self._log.keep(line for line, row in self._log.read() if _is_row(row) and row["step"] <= step)
        self._board: Any = _board(folder / "tensorboard") if tensorboard else None

    def write(self, event: str, step: int, **values: Any) -> None:
        """Write one row."""
        self._log.append([{"event": event, "step": step, **values}], sync=False)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(f"{event}/{name}", value, step)
                elif event == "sample" and name == "text":
                    self._board.add_text("sample", value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[Record]:
    """All complete rows of a run."""
    log = JsonLog(folder / METRICS)
    if not log.file.exists():
        raise FileNotFoundError(f"no {METRICS} in {folder}; expected the output folder of efla train")
    return [row for _, row in log.read() if _is_row(row)]


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("step"), int)


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RuntimeError("--tensorboard needs the package tensorboard: pip install 'efla[train]'") from None
    return SummaryWriter(str(folder))
