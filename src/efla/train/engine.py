"""Distributed training: PyTorch's process groups, DDP, FSDP2 and meshes. No other module of training uses them.

Without torchrun there is one process; under torchrun there is one per device, with gloo on CPUs and NCCL on GPUs.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from efla.models.loading import choose_device
from efla.train.config import MachineOptions
from efla.train.sequence import SequenceGroup, split_sequence


@dataclass(frozen=True)
class Engine:
    """This process's rank, and what ranks do together.

    The ``world`` ranks hold ``data_world`` different sets of rows; each row is split over ``sequence_world`` ranks.
    """

    device: torch.device
    strategy: str = "single"
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    sequence: SequenceGroup | None = None
    owns_group: bool = False

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> Engine:
        """One process, no process group."""
        return cls(torch.device(device))

    @classmethod
    def start(cls, options: MachineOptions) -> Engine:
        """Join the process group that torchrun describes in the environment, if there is one."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        check_layout(options, world)
        device = _device(options.device)
        if world == 1 and options.strategy in ("auto", "single"):
            return cls.alone(device)
        owns_group = not dist.is_initialized()
        if owns_group:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            timeout = datetime.timedelta(minutes=options.timeout_minutes)
            store, own_rank = _store(timeout)
            size = -1 if store is None else world
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=own_rank, world_size=size, timeout=timeout)
        strategy = "ddp" if options.strategy == "auto" else options.strategy
        mesh = None
        if strategy == "fsdp":
            mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        elif strategy == "hsdp":
            size = cast(int, options.shard_size)
            mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))
        sequence = SequenceGroup.create(options.sequence_parallel) if options.sequence_parallel > 1 else None
        return cls(device, strategy, dist.get_rank(), world, mesh, sequence, owns_group)

    @property
    def sequence_world(self) -> int:
        return 1 if self.sequence is None else self.sequence.size

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_world

    @property
    def data_world(self) -> int:
        return self.world // self.sequence_world

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized() and self.strategy != "single"

    def wrap(self, model: nn.Module, *, compile_blocks: bool = False) -> nn.Module:
        """Move the model to its device, split, compile, replicate or shard it, as the engine is configured."""
        blocks = list(cast(Any, model).model.layers)
        if self.sequence is not None:
            split_sequence(model, self.sequence)
        if self.strategy in ("single", "ddp"):
            model.to(self.device)
        if compile_blocks:
            for block in blocks:
                block.compile()
        if self.strategy == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        if self.mesh is not None:
            for block in blocks:
                fully_shard(block, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        return model

    def accumulating(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """A context in which gradients are exchanged only for the last micro-batch."""
        if isinstance(model, DistributedDataParallel):
            return nullcontext() if is_last else model.no_sync()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Autocast of linear maps to bfloat16; weights, norms, scan coefficients and states stay in float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks, in float64."""
        if not self.is_distributed:
            return list(values)
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        tensor = torch.tensor(values, dtype=kind, device=self.device)
        dist.all_reduce(tensor)
        return cast("list[float]", tensor.tolist())

    def count_labels(self, number: int) -> int:
        """The sum of a count of labels over the ranks that hold different rows."""
        if self.data_world == 1:
            return number
        return round(self.all_reduce_sum([float(number)])[0] / self.sequence_world)

    def barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()

    def from_main(self, value: Any) -> Any:
        """The main rank's value, on every rank."""
        if not self.is_distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def close(self) -> None:
        """Leave the process group if this engine joined it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def whole_sequences(self) -> AbstractContextManager[None]:
        """A context in which rows are not split, for generation, where every rank does the same."""
        return nullcontext() if self.sequence is None else self.sequence.paused()


ALONE = Engine.alone()
"""One process on the CPU."""


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP's wrapper, with weights resharded that FSDP2 left unsharded after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


def check_layout(options: MachineOptions, world: int) -> None:
    """Raise an error if the layout does not fit the number of ranks."""
    if options.strategy == "single" and world > 1:
        raise ValueError(f"strategy 'single' is for one process, but torchrun started {world}; use ddp, fsdp or hsdp")
    if options.strategy == "hsdp" and (options.shard_size is None or world % options.shard_size):
        raise ValueError(
            f"hsdp needs --shard-size, the ranks that share one copy of the weights, as a divisor of the {world} ranks; "
            f"got {options.shard_size}"
        )
    if world % options.sequence_parallel:
        raise ValueError(
            f"--sequence-parallel must divide the {world} ranks (torchrun's nodes times processes), "
            f"got {options.sequence_parallel}"
        )


def _device(name: str) -> torch.device:
    device = choose_device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return device


def _store(timeout: datetime.timedelta) -> tuple[Store | None, int]:
    """The store through which ranks find each other, and this rank; ``None`` and -1 leave both to torch."""
    if "MASTER_ADDR" not in os.environ:  # one rank, started without torchrun
        return HashStore(), 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None, -1
    # torchrun keeps one store for all attempts (seen in torch 2.13). Without a prefix per attempt, a restarted rank reads
    # the addresses of ranks that have ended, and fails or hangs.
    server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"efla/attempt-{attempt}", server), int(os.environ["RANK"])
