"""Estimates for a run before it starts: parameters, state, operations, tokens, time and memory."""

import os
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from efla.errors import check_names
from efla.train.config import TrainConfig

# Dense bfloat16 peak in TFLOP/s and memory in GB of one device, from the data sheets.
DEVICES = {"a100": 312.0, "h100": 989.0, "h200": 989.0, "b200": 2250.0, "l40s": 362.0, "4090": 165.0}
MEMORY_GB = {"a100": 80.0, "h100": 80.0, "h200": 141.0, "b200": 180.0, "l40s": 48.0, "4090": 24.0}


@dataclass(frozen=True)
class Machines:
    """The devices to estimate for."""

    device: Annotated[str, tyro.conf.arg(name="estimate-device")] = "here"
    """With --dry-run: a device to estimate for (a100, h100, h200, b200, l40s, 4090) instead of this machine."""
    count: Annotated[int | None, tyro.conf.arg(name="estimate-count")] = None
    """With --dry-run: number of devices to estimate for (default: the processes that torchrun started, or 1)."""
    utilisation: float = 0.4
    """With --dry-run: share of the device's peak that training is assumed to reach; a guess, so measure it."""


def estimate(config: TrainConfig, machines: Machines) -> dict[str, Any]:
    """Facts and estimates of a run, in the order they are printed."""
    from efla.models import accounting

    check_names("device", [machines.device], ("here", *DEVICES))
    model = config.model_config()
    parameters = accounting.count_parameters(model)
    world = machines.count or int(os.environ.get("WORLD_SIZE", "1"))
    sequence = config.machine.sequence_parallel
    micro = config.micro_rows(max(1, world // sequence))
    # Softmax layers see half a row on average; the backward pass costs twice the forward.
    flops = 3 * accounting.flops_per_token(model, config.data.length // 2)
    if config.machine.gradient_checkpointing:
        flops = flops * 4 // 3
    peak = _peak_here() if machines.device == "here" else DEVICES[machines.device] * 1e12
    seconds = flops * config.total_tokens / (peak * machines.utilisation * world)
    sharded = {"fsdp": world, "hsdp": config.machine.shard_size or 1}.get(config.machine.strategy, 1)
    weights = parameters * 16 / sharded  # float32 weights, gradients and AdamW's two averages
    activations = activation_bytes(config, micro * config.data.length // sequence)
    needed = round((weights + activations) / 1e9, 2)
    available = MEMORY_GB.get(machines.device, round(_memory_here() / 1e9, 1))
    schedule = config.schedule()
    corners = {0, schedule.warmup_steps - 1, schedule.warmup_steps, schedule.steps - 1}
    steps = sorted(step for step in corners if 0 <= step < schedule.steps)
    return {
        "parameters": parameters,
        "state_bytes_per_sequence": accounting.state_bytes(model),
        "training_flops_per_token": flops,
        "tokens_per_step": config.tokens_per_step,
        "steps": config.optimizer.steps,
        "tokens": config.total_tokens,
        "training_flops": flops * config.total_tokens,
        "rate_at_step": {str(step): schedule.rate(step) for step in steps},
        "devices": f"{world} x {machines.device}",
        "rows_of_a_forward_pass": micro,
        "micro_batches_a_step": config.data.rows // max(1, world // sequence) // micro,
        "assumed_flops_per_second_and_device": round(peak * machines.utilisation),
        "estimated_hours": round(seconds / 3600, 3),
        "estimated_memory_gb_per_device": needed,
        "memory_of_a_device_gb": available,
        "fits": needed < available,
    }


def activation_bytes(config: TrainConfig, tokens: int) -> float:
    """Approximate bytes kept for the backward pass of ``tokens`` tokens on a device.

    Per block and token: the inputs of every linear map, convolution, norm and scan. With gradient checkpointing: the
    input of every block, and one block in full. Logits are kept for loss_chunk_size tokens.
    """
    model = config.model_config()
    size = 2 if config.optimizer.precision == "bfloat16" else 4
    d, mlp = model.hidden_size, model.intermediate_size or 0
    mixers: list[str] = list(model.mixers or [])
    per_block = []
    for mixer in mixers:
        if mixer == "softmax":
            width = 4 * model.num_attention_heads * (model.attention_head_dim or 0)
        elif mixer == "mamba2":
            width = 8 * model.mamba_expand * d
        else:
            keys = (model.num_key_heads or 0) * (model.head_dim or 0)
            width = 3 * (2 * keys + 2 * model.num_heads * (model.value_head_dim or 0))
        per_block.append(4 * 4 * d + size * (2 * d + width + 4 * mlp))
    logits = 2 * 4 * min(tokens, model.loss_chunk_size) * model.vocab_size
    if config.machine.gradient_checkpointing:
        return tokens * (4 * d * len(mixers) + max(per_block)) + logits
    return tokens * sum(per_block) + logits


def _peak_here() -> float:
    """Operations per second of this machine's device: known for some GPUs, else measured on a matrix product."""
    import torch

    from efla.runs.timing import samples_in_turn

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        known = next((peak for key, peak in DEVICES.items() if key in name), None)
        if known is not None:
            return known * 1e12
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 4096 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device)
    (seconds,) = samples_in_turn({"": lambda: float((a @ a)[0, 0])}, rounds=5).values()  # float waits for the device
    return 2 * size**3 / min(seconds)


def _memory_here() -> float:
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("nan")
