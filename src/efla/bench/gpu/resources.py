"""What a compiled kernel uses: shared memory, registers and spilled bytes, read from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from efla.bench.gpu.targets import Target


class Resources(NamedTuple):
    """Per thread block: shared bytes; per thread: registers and bytes of spilled registers."""

    warps: int
    stages: int
    shared: int
    registers: int
    spilled: int

    def excess(self, target: Target) -> str | None:
        """Why the kernel cannot be launched on the target, or ``None``."""
        if self.shared > target.shared_bytes:
            return f"shared memory {self.shared:,} > {target.shared_bytes:,} bytes"
        needed = self.registers * self.warps * target.warp_size
        if needed > target.registers:
            return f"registers {needed:,} > {target.registers:,} per block"
        return None


def read_resources(kernel: Any, target: Target) -> Resources:
    """From a kernel compiled by Triton for the target."""
    metadata = kernel.metadata
    if target.backend == "hip":
        registers, spilled = parse_amdgcn(kernel.asm["amdgcn"])
    else:
        registers, spilled = parse_cuobjdump(_cuobjdump(kernel.asm["cubin"]))
    return Resources(metadata.num_warps, metadata.num_stages, metadata.shared, registers, spilled)


def parse_cuobjdump(text: str) -> tuple[int, int]:
    """Registers and stack bytes of the only function in the output of ``cuobjdump -res-usage``.

    Triton's kernels have no arrays of their own, so that the stack holds spilled registers and nothing else.
    """
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump's output names no registers: {text[-300:]!r}")
    return int(registers[1]), int(stack[1])


def parse_amdgcn(assembly: str) -> tuple[int, int]:
    """Vector registers (accumulation registers included) and spilled bytes from an AMD kernel's metadata."""
    fields = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly)}
    if fields.keys() < {"vgpr_count", "vgpr_spill_count"}:
        raise ValueError("the AMD assembly names no registers")
    return fields["vgpr_count"], 4 * fields["vgpr_spill_count"]


def _cuobjdump(cubin: bytes) -> str:
    """The resource listing, by the cuobjdump inside Triton's package."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([program, "-res-usage", path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
