"""A GPU that is not there: lets flash-linear-attention choose its kernels as on a target, on tensors of the CPU.

For processes of their own only: it changes Triton and torch for good, and no kernel runs in them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from efla.bench.gpu.targets import Target


def install_driver(target: Target) -> None:
    """Give Triton a driver that describes the target. Must come before flash-linear-attention is imported."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    os.environ.pop("TRITON_INTERPRET", None)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    triton_target = GPUTarget(target.backend, target.triton_arch, target.warp_size)

    class Utilities:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": target.shared_bytes, "multiprocessor_count": 100, "warpSize": target.warp_size}

    class Driver:
        utils = Utilities()

        def get_current_target(self) -> Any:
            return triton_target

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    driver.set_active(Driver())
    torch.cuda.get_device_capability = lambda device=None: target.capability  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda device=None: target.example
    torch.cuda.device_count = lambda: 1


def accept_cpu_tensors() -> None:
    """Let the fla backend take tensors of the CPU, as if they were on the target."""
    from efla.scans.backends import fla

    fla.unavailable = lambda: None
    fla.supports = lambda k, v, dtype: None
