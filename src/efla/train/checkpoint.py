"""Checkpoints that runs resume from: PyTorch's distributed checkpoints, as safetensors, atomic and verified.

    checkpoints/step-00000100/
        shard-00001-...safetensors    weights and AdamW's averages, a shard per rank; any number of ranks can load them
        rank-00000.json               random states of a rank
        state.json                    step, counters, resume key
        manifest.json                 size and SHA-256 of every other file, written last

A checkpoint is written under a temporary name and renamed when it is complete, so a kill never damages one.
"""

import base64
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from efla.data.files import checksum, file_damage
from efla.runs.records import Record
from efla.runs.rows import explain_write, write_atomically
from efla.train.engine import Engine, unwrap

STATE, MANIFEST = "state.json", "manifest.json"
_AVERAGES = ("exp_avg", "exp_avg_sq")
_FILE_BYTES = 1 << 28


class Checkpoints:
    """The checkpoints of a run, written and read by all ranks together."""

    def __init__(self, folder: Path, engine: Engine, *, keep: int = 2, keep_every: int = 0) -> None:
        self.folder, self.engine, self.keep, self.keep_every = folder, engine, keep, keep_every
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        # A separate group, because an asynchronous save communicates at the same time as training.
        self._group = dist.new_group(backend="gloo") if engine.is_distributed else None

    def saved(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())

    def latest(self) -> Path | None:
        """The newest complete checkpoint; the remains of an interrupted save are removed."""
        if self.engine.is_main:
            for leftover in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(leftover)
        newest = str(self.saved()[-1]) if self.saved() else None
        found = self.engine.from_main(newest)
        return None if found is None else Path(found)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: Record, *, wait: bool = True
    ) -> None:
        """Save; with ``wait=False`` copy the tensors now and write them in the background."""
        self.wait()
        final = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".step-{step:08d}.tmp"
        try:
            if self.engine.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            self.engine.barrier()
            tensors = state_tensors(model, optimizer)
            (steps,) = {int(optimizer.state[p]["step"]) for group in optimizer.param_groups for p in group["params"]}
            record = {**state, "step": step, "optimizer_steps": steps}
            rank_file = temporary / f"rank-{self.engine.rank:05d}.json"
            rank_file.write_text(json.dumps(_random_state(self.engine.device)))
            writer = HuggingFaceStorageWriter(
                path=str(temporary), save_distributed=True, fqn_to_index_mapping=_cut_into_files(tensors)
            )
            if wait:
                self._finish(temporary, final, record, lambda: _write(tensors, writer, self._group))
                self.engine.barrier()
                return
            write = _start_save(tensors, writer, self._group)
        except OSError as error:
            raise explain_write(error, self.folder) from error
        self._writing = self._background.submit(lambda: self._finish(temporary, final, record, write))

    def wait(self) -> None:
        """Wait for an asynchronous save to complete; raises its error if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except OSError as error:
                raise explain_write(error, self.folder) from error
            self.engine.barrier()

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
        """Load a checkpoint, written by any number of ranks, into the model and its optimizer; returns its state."""
        problem = self.engine.from_main(verify(path) if self.engine.is_main else None)
        if problem is not None:
            raise ValueError(
                f"the checkpoint {path} is damaged: {problem}. Remove that folder to resume from the one before it"
            )
        state: Record = json.loads((path / STATE).read_text())
        tensors = state_tensors(model, optimizer)
        reader = HuggingFaceStorageReader(str(path))
        try:
            with _without_warning():
                load(tensors, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, SafetensorError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise ValueError(f"the checkpoint {path} does not fit this model: {reason[0].strip()}") from error
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p]["step"].fill_(state["optimizer_steps"])
        own = path / f"rank-{self.engine.rank:05d}.json"
        if own.exists():
            _restore_random_state(json.loads(own.read_text()), self.engine.device)
        return state

    def _finish(self, temporary: Path, final: Path, record: Record, write: Callable[[], Any]) -> None:
        """After every rank has written its shard, on the main rank: write the manifest, rename, remove old checkpoints."""
        write()
        if not self.engine.is_main:
            return
        write_atomically(temporary / STATE, (json.dumps(record) + "\n").encode())
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": checksum(file)} for file in sorted(temporary.iterdir())
        }
        for name in files:
            _sync(temporary / name)
        write_atomically(temporary / MANIFEST, (json.dumps(files, indent=1) + "\n").encode())
        if final.exists() and verify(final) is None:  # the same step, saved before an interruption
            shutil.rmtree(temporary)
        else:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
        _sync(self.folder)
        for old in self.saved()[: -self.keep]:
            number = int(old.name.removeprefix("step-"))
            if not (self.keep_every and number % self.keep_every == 0):
                shutil.rmtree(old)


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or ``None``."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    problems = (file_damage(path / name, known["bytes"], known["sha256"]) for name, known in manifest.items())
    return next((problem for problem in problems if problem is not None), None)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and AdamW's averages by name, not copied, sharded if the model is."""
    tensors: dict[str, Tensor] = {}
    for name, p in unwrap(model).named_parameters():
        tensors[f"model.{name}"] = p.detach()
        for average in _AVERAGES:
            tensors[f"optimizer.{name}.{average}"] = optimizer.state[p][average]
    return tensors


def _cut_into_files(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The number of the file, from 1, for each tensor. Files are limited in size because they are assembled in memory."""
    number, filled = 1, 0
    files = {}
    for name, tensor in tensors.items():
        size = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def _write(tensors: dict[str, Tensor], writer: Any, group: dist.ProcessGroup | None) -> Any:
    with _without_warning():
        return save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


def _start_save(tensors: dict[str, Tensor], writer: Any, group: dist.ProcessGroup | None) -> Callable[[], Any]:
    """Copy the tensors. The returned function writes the copies, or waits until torch has written them."""
    if group is not None:
        return cast("Future[Any]", async_save(tensors, storage_writer=writer, process_group=group)).result
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return lambda: _write(copies, writer, None)


@contextmanager
def _without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended: one process
        yield


def _random_state(device: torch.device) -> Record:
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: Record = {
        "torch": _pack(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
    }
    if device.type == "cuda":
        state["cuda"] = _pack(torch.cuda.get_rng_state(device))
    return state


def _restore_random_state(state: Record, device: torch.device) -> None:
    torch.set_rng_state(_unpack(state["torch"]))
    version, values, extra = state["python"]
    random.setstate((version, tuple(values), extra))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_unpack(state["cuda"]), device)


def _pack(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _unpack(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
