"""The output folder of a training run.

    config.json      the resolved config, the model's config, versions, git commit, machine
    metrics.jsonl    every step, validation and sample
    checkpoints/     what a run resumes from
    model/           the result, in the format of transformers
    data/            tokens of text that was not prepared before

The metrics are the source of truth; the display, TensorBoard and Weights & Biases show the same numbers. Every row has
``event`` and ``step``, the number of steps done so far:

    start       a process started or resumed at this step
    step        loss (nats), norm, rate, tokens so far, seconds, tokens_per_second, applied
    validation  loss, bits_per_token, perplexity, tokens
    sample      prompt, text
    end         why: finished, SIGTERM, SIGINT
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efla.errors import import_optional
from efla.runs.folder import CONFIG, FORMAT, LOCK, lock_folder, require_same, write_config
from efla.runs.records import Record
from efla.runs.rows import JsonLog
from efla.train.config import TrainConfig

METRICS, DATA = "metrics.jsonl", "data"


@contextmanager
def open_output(path: Path, config: TrainConfig) -> Iterator[None]:
    """Lock a new folder, or one of a run with the same config, while the context lasts."""
    with lock_folder(path):
        file = path / CONFIG
        if file.exists():
            try:
                there = json.loads(file.read_text())["fixed"]
            except (ValueError, KeyError) as error:
                message = f"{file} is not the config of a training run ({error}); choose another --output"
                raise ValueError(message) from error
            check_resumable(there, config, path)
        elif others := sorted(file.name for file in path.iterdir() if file.name not in (LOCK, DATA)):
            raise ValueError(
                f"{path} holds {', '.join(others[:3])} but no {CONFIG} of a run; nothing was changed. Choose another --output"
            )
        yield


def record_config(path: Path, config: TrainConfig) -> None:
    """Write the config of a new run, whose data and model were accepted; from now on the folder is of this run only."""
    if (path / CONFIG).exists():
        return
    from efla.runs import provenance

    record = {
        "format": FORMAT,
        "config": config.record(),
        "fixed": config.resume_key(),
        "model": json.loads(config.model_config().to_json_string()),
        **provenance.stamp(),
    }
    write_config(path, record)


def check_resumable(there: Record, config: TrainConfig, path: Path) -> None:
    """Raise an error if a run with the resume key ``there`` cannot resume with this config."""
    require_same(there, config.resume_key(), f"{path} holds a run with another config")


class MetricsLog:
    """Appends rows to ``metrics.jsonl``, and sends them to TensorBoard and Weights & Biases if asked to.

    Opening it drops the rows after ``step``, where the run resumes: they are computed again.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False, wandb: bool = False) -> None:
        self._log = JsonLog(folder / METRICS)
        if self._log.file.exists():
            self._log.keep(line for line, row in self._log.read() if _is_row(row) and row["step"] <= step)
        self._boards: list[_TensorBoard | _Wandb] = [_TensorBoard(folder)] if tensorboard else []
        self._boards += [_Wandb(folder)] if wandb else []

    def write(self, event: str, step: int, **values: Any) -> None:
        """Write one row."""
        self._log.append([{"event": event, "step": step, **values}], sync=False)
        numbers = {
            f"{event}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for board in self._boards:
            board.write(numbers, values["text"] if event == "sample" else None, step)

    def close(self) -> None:
        for board in self._boards:
            board.close()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        missing = "--tensorboard needs the package tensorboard: pip install 'efla[train]'"
        self._writer = import_optional("torch.utils.tensorboard", missing).SummaryWriter(str(folder / "tensorboard"))
        self.close = self._writer.close

    def write(self, numbers: dict[str, float], sample: str | None, step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if sample is not None:
            self._writer.add_text("sample", sample, step)


class _Wandb:
    """A run of Weights & Biases in the project of WANDB_PROJECT, default "efla"; a resumed run continues it."""

    def __init__(self, folder: Path) -> None:
        wandb = import_optional("wandb", "--wandb needs the package wandb: pip install wandb, then wandb login")
        project = os.environ.get("WANDB_PROJECT", "efla")
        config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else None
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=config, resume="auto")
        self.close = self._run.finish

    def write(self, numbers: dict[str, float], sample: str | None, step: int) -> None:
        self._run.log({**numbers, **({} if sample is None else {"sample": sample})}, step=step)


def read_metrics(folder: Path) -> list[Record]:
    """All complete rows of a run."""
    log = JsonLog(folder / METRICS)
    if not log.file.exists():
        raise FileNotFoundError(f"no {METRICS} in {folder}; expected the output folder of efla train")
    return [row for _, row in log.read() if _is_row(row)]


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("step"), int)


def si(value: float, unit: str = "") -> str:
    """A number with three digits and a prefix: ``12.3 k``, ``4.56 TFLOP``."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()
