"""GPU architectures to compile for, and a Triton driver that describes one without a device.

The driver changes Triton and torch for the rest of the process, so it is only used in processes of its own.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from efla.errors import check_names


@dataclass(frozen=True)
class Target:
    """One architecture. Limits are per thread block, from the vendors' manuals."""

    name: str
    example: str
    backend: str  # Triton's name
    capability: tuple[int, int]  # the value of torch.cuda.get_device_capability
    warp_size: int
    shared_bytes: int
    registers: int  # 32-bit registers of one multiprocessor

    @property
    def triton_arch(self) -> int | str:
        return self.name if self.backend == "hip" else 10 * self.capability[0] + self.capability[1]


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "A100", "cuda", (8, 0), 32, 163 * 1024, 65536),
        Target("sm_90", "H100", "cuda", (9, 0), 32, 227 * 1024, 65536),
        Target("sm_100", "B200", "cuda", (10, 0), 32, 227 * 1024, 65536),
        # 4 SIMDs of 512 vector registers (accumulation registers included) for each of 64 lanes.
        Target("gfx942", "MI300X", "hip", (9, 4), 64, 64 * 1024, 4 * 512 * 64),
    )
}


def get_target(name: str) -> Target:
    check_names("target", [name], TARGETS)
    return TARGETS[name]


def install_driver(target: Target) -> None:
    """Give Triton a driver that describes the target. Call it before flash-linear-attention is imported."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    os.environ.pop("TRITON_INTERPRET", None)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    triton_target = GPUTarget(target.backend, target.triton_arch, target.warp_size)

    properties = {"max_shared_mem": target.shared_bytes, "multiprocessor_count": 100, "warpSize": target.warp_size}
    described = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
        get_current_target=lambda: triton_target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(described)
    torch.cuda.get_device_capability = lambda device=None: target.capability  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda device=None: target.example
    torch.cuda.device_count = lambda: 1


def replace_launches(run: Callable[..., Any], tune: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``run`` and ``tune`` where Triton would launch or autotune a kernel; returns the original ``JITFunction.run``."""
    from fla.ops.utils.cache import CachedAutotuner
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    original: Callable[..., Any] = JITFunction.run
    JITFunction.run = run
    Autotuner.run = CachedAutotuner.run = tune
    return original
