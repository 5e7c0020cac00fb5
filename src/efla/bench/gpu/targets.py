"""The GPUs the kernels are compiled for without having one, and what one thread block may use on them."""

from __future__ import annotations

from dataclasses import dataclass

from efla.errors import unknown_name


@dataclass(frozen=True)
class Target:
    """One architecture. Limits are those of the vendors' manuals, per thread block."""

    name: str
    example: str
    backend: str  # as Triton names it
    capability: tuple[int, int]  # as torch.cuda.get_device_capability gives it
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
    if name not in TARGETS:
        raise unknown_name("target", name, TARGETS)
    return TARGETS[name]
