"""What runs in each rank: ``rank_checks.py CHECK MEETING_FILE ARGUMENTS RESULT_FILE...``, one result file for each rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from small import small

from efla import EflaConfig, EflaForCausalLM
from efla.train import loop
from efla.train.config import MachineOptions
from efla.train.engine import Engine
from efla.train.step import num_labels, row_loss
from processes import LAST_RESORT

MIXERS = {
    "efla": {"rule": "efla"},
    "delta": {"rule": "delta"},
    "gated_efla": {"rule": "gated_efla", "value_head_dim": 24},
    "gated_delta-grouped": {"rule": "gated_delta", "num_key_heads": 1},
    "linear": {"rule": "linear"},
    "mamba2": {"mixers": ["mamba2"], "intermediate_size": 0},
    "no-convolution": {"rule": "efla", "conv_size": 0},
}


def tiny(**fields):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "mamba_head_dim": 16,
        "mamba_state_size": 8,
        "intermediate_size": 48,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = EflaForCausalLM(EflaConfig(**{**sizes, **fields}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(5)  # a memory that matters
    return model


def sequence_parallel(dtype: str, length: int, size: int):
    """Loss and gradients of rows split over the ranks, against the same rows on one rank."""
    engine = Engine.start(MachineOptions(sequence_parallel=size))
    rows = torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(1))
    results = {}
    for name, fields in MIXERS.items():
        for checkpointing in (False, True) if name == "efla" else (False,):
            whole, split = (tiny(**fields).to(getattr(torch, dtype)).train() for _ in range(2))
            loss = row_loss(whole, rows, num_labels(rows, None))
            loss.backward()
            if checkpointing:
                split.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped = engine.wrap(split)
            part = row_loss(wrapped, rows, num_labels(rows, None), engine=engine)
            (part * engine.world).backward()
            error = max(
                float((a.grad - b.grad).norm() / a.grad.norm())
                for a, b in zip(whole.parameters(), split.parameters(), strict=True)
            )
            together = engine.all_reduce_sum([float(part.detach())])[0]
            results[f"{name}{'-checkpointed' * checkpointing}"] = [abs(together - float(loss)), error]
    engine.close()
    return results


def train_runs(folder: str):
    """Runs by every strategy, each against the one of a single process; and the first steps of one that moves on."""
    runs = {
        "ddp": {},
        "ddp-async": {"async_save": True},
        "ddp-checkpointing": {"gradient_checkpointing": True, "micro_rows": 1},
        "fsdp": {"strategy": "fsdp"},
        "fsdp-micro": {"strategy": "fsdp", "micro_rows": 1, "async_save": True},
        "hsdp": {"strategy": "hsdp", "shard_size": 1},
    }
    for name, changes in runs.items():
        loop.run(small(documents="reset", **changes), Path(folder) / name)
    for name in ("ddp", "fsdp"):
        for stop_after in (5, None):
            config = small(documents="reset", strategy=name, stop_after=stop_after)
            loop.run(config, Path(folder) / f"{name}-stopped")
    loop.run(small(sequence_parallel=2), Path(folder) / "sequence")
    moving = str(Path(folder) / "moving")
    train_first(moving)
    train_alone(moving)
    train_rest(moving)
    return {}


def train_first(folder: str):
    loop.run(small(documents="reset", strategy="fsdp", stop_after=4, keep=9), Path(folder))
    return {}


def train_alone(folder: str):
    """The first rank for itself, as if there were no others."""
    if torch.distributed.get_rank() == 0:
        world, os.environ["WORLD_SIZE"] = os.environ["WORLD_SIZE"], "1"
        loop.run(small(documents="reset", stop_after=8, keep=9), Path(folder))
        os.environ["WORLD_SIZE"] = world
    torch.distributed.barrier()
    return {}


def train_rest(folder: str):
    loop.run(small(documents="reset", strategy="fsdp", keep=9), Path(folder))
    return {}


def train_hybrid(folder: str):
    """Two copies of the weights, each sharded over two of the four ranks; stopped halfway and continued."""
    for stop_after in (6, None):
        loop.run(small(documents="reset", strategy="hsdp", shard_size=2, stop_after=stop_after), Path(folder))
    return {}


def run_rank(rank: int, check: str, meeting: str, arguments: str, result_files: list[str]) -> int:
    """Fork a rank that writes the result of its check, and give its process number."""
    if pid := os.fork():
        return pid
    signal.alarm(LAST_RESORT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(result_files))}
    # Once, for all runs of a check. Ranks meet in a file: a port that is free now may be taken a moment later.
    options = {"init_method": f"file://{meeting}", "rank": rank, "world_size": len(result_files)}
    torch.distributed.init_process_group("gloo", **options)
    result = globals()[check](**json.loads(arguments))
    Path(result_files[rank]).write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
    sys.exit()


if __name__ == "__main__":
    check, meeting, arguments, *result_files = sys.argv[2:]
    # Forks of one process, which has imported everything once.
    ranks = [run_rank(rank, check, meeting, arguments, result_files) for rank in range(len(result_files))]
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with exit code {os.waitstatus_to_exitcode(status)}")
