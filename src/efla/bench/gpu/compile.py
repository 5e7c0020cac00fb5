"""Ahead-of-time compilation of every kernel the fla backend launches on a GPU that need not be present.

    python -m efla.bench.gpu.compile TARGET WIDTH DTYPE [--packed] [--all-configs]

prints one JSON object per compiled kernel. Triton gets a driver that describes the target, so flash-linear-attention picks
the configurations it would pick on that GPU. The backend then runs forward and backward as a user would call it, and each
launch becomes a compilation.

By default the autotuner's configurations are compiled until one fits; ``--all-configs`` compiles all of them.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from efla.bench.gpu import run_module
from efla.bench.gpu.target import Target, get_target, install_driver, replace_launches
from efla.scans.request import ScanRequest


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel in one configuration: the resources it uses, or ``problem``, why it cannot run on the target.

    Kernels with the same ``launch`` number are alternative configurations. shared: bytes per thread block; registers, and
    spilled bytes of registers: per thread.
    """

    launch: int
    target: str
    width: int
    dtype: str
    operation: str
    kernel: str
    config: str
    warps: int = 0
    stages: int = 0
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    seconds: float = 0.0
    problem: str | None = None

    def excess(self, target: Target) -> str | None:
        """Why the kernel cannot be launched on the target, or ``None``."""
        if self.shared > target.shared_bytes:
            return f"shared memory {self.shared:,} > {target.shared_bytes:,} bytes"
        needed = self.registers * self.warps * target.warp_size
        return f"registers {needed:,} > {target.registers:,} per block" if needed > target.registers else None


def compile_kernels(
    targets: tuple[str, ...],
    widths: tuple[int, ...],
    dtype: str,
    *,
    packed: bool = False,
    all_configs: bool = False,
    jobs: int = 1,
) -> Iterator[tuple[str, int, list[CompiledKernel]]]:
    """Compile in ``jobs`` processes; yields (target, width, kernels) in the order in which they finish."""
    options = ["--packed"] * packed + ["--all-configs"] * all_configs
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(run_module, "efla.bench.gpu.compile", target, str(width), dtype, *options): (target, width)
            for target in targets
            for width in widths
        }
        for done in as_completed(running):
            yield *running[done], [CompiledKernel(**row) for row in done.result()]


def parse_cuobjdump(text: str) -> tuple[int, int]:
    """Registers and stack bytes of the only function in the output of ``cuobjdump -res-usage``.

    Triton kernels have no local arrays, so the stack holds only spilled registers.
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
    """The resource listing from the cuobjdump in Triton's package."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([program, "-res-usage", path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# Rule -> whether it decays, and what it erases: nothing, what it writes, or something else. These rules reach every
# operation and all of its kernels.
RULES: dict[str, tuple[bool, str | None]] = {
    "linear": (False, None),
    "ssd": (True, None),
    "efla": (False, "write"),
    "gated_delta": (True, "write"),
    "gated_efla": (True, "other"),
}


def requests(width: int, dtype: torch.dtype, packed: bool) -> Iterator[tuple[ScanRequest, bool]]:
    """Requests and whether they are differentiated: each rule in training and in decoding."""
    heads = 4
    for has_decay, erase in RULES.values():
        for differentiable in (True, False):
            length = 256 if differentiable else 1
            cu_seqlens = torch.tensor([0, length // 2, length]) if packed and differentiable else None
            num_sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
            q, k, v = (torch.zeros(1, length, heads, width, dtype=dtype, requires_grad=True) for _ in range(3))
            log_decay, other, write = (torch.zeros(1, length, heads, requires_grad=True) for _ in range(3))
            state = torch.zeros(num_sequences, heads, width, width, requires_grad=True)
            request = ScanRequest(
                q=q,
                k=k,
                v=v,
                log_decay=log_decay if has_decay else None,
                erase={None: None, "write": write, "other": other}[erase],
                write=write,
                scale=width**-0.5,
                initial_state=state if packed or not differentiable else None,
                cu_seqlens=cu_seqlens,
                chunk_size=64,
            )
            yield request, differentiable


class _Recorder:
    """Compiles where Triton would launch, and prints each kernel the first time."""

    def __init__(self, target: Target, width: int, dtype: str) -> None:
        self.target, self.width, self.dtype = target, width, dtype
        self.operation = ""
        self.launch = 0
        self.seen: dict[int, bool] = {}

    def compile(self, function: Any, compile_one: Callable[[], Any], config: str) -> bool:
        """Compile one configuration; returns whether it fits the target."""
        start = time.perf_counter()
        what = (self.launch, self.target.name, self.width, self.dtype, self.operation, function.__name__, config)
        found, kernel = CompiledKernel(*what), None
        try:
            kernel = compile_one()
            if id(kernel) in self.seen:
                return self.seen[id(kernel)]
            if self.target.backend == "hip":
                registers, spilled = parse_amdgcn(kernel.asm["amdgcn"])
            else:
                registers, spilled = parse_cuobjdump(_cuobjdump(kernel.asm["cubin"]))
            used = kernel.metadata
            found = CompiledKernel(*what, used.num_warps, used.num_stages, used.shared, registers, spilled)
            problem = found.excess(self.target)
        except Exception as error:
            # A compiler error is a result too; the other kernels are still compiled.
            problem = f"{type(error).__name__}: {str(error).strip()[:300]}"
        found = replace(found, seconds=round(time.perf_counter() - start, 2), problem=problem)
        print(json.dumps(asdict(found)), flush=True)
        if kernel is not None:
            self.seen[id(kernel)] = problem is None  # Triton's cache keeps the kernel alive, so its id stays unique
        return problem is None

    def install(self, all_configs: bool) -> None:
        """Turn launches into compilations."""
        tuning = False

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            def compile_one() -> Any:
                return compile_or_launch(function, *args, grid=grid, warmup=True, **options)

            if tuning:
                return compile_one()
            self.launch += 1
            return self.compile(function, compile_one, "")

        def tune(tuner: Any, *args: Any, **options: Any) -> None:
            nonlocal tuning
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            tuning = True
            self.launch += 1
            try:
                for config in tuner.prune_configs(options):

                    def compile_one(config: Any = config) -> Any:
                        return tuner.fn.run(*args, **options, **config.all_kwargs())

                    described = ", ".join(f"{key} {value}" for key, value in config.kwargs.items())
                    if self.compile(tuner.base_fn, compile_one, described) and not all_configs:
                        return
            finally:
                tuning = False

        compile_or_launch = replace_launches(run, tune)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("width", type=int)
    parser.add_argument("dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--all-configs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = get_target(options.target)
    install_driver(target)
    recorder = _Recorder(target, options.width, options.dtype)
    recorder.install(options.all_configs)

    from efla.scans.backends.fla.operations import choose_operation, run

    for request, differentiable in requests(options.width, getattr(torch, options.dtype), options.packed):
        recorder.operation = choose_operation(request, differentiable).name
        with torch.set_grad_enabled(differentiable):
            o, final_state = run(request, differentiable)
        if differentiable:
            torch.autograd.backward([o, final_state], [torch.zeros_like(o), torch.zeros_like(final_state)])


if __name__ == "__main__":
    main()
