"""Compiles every kernel the fla backend would launch on a GPU that is not there; run as a process of its own.

    python -m efla.bench.gpu.compile_kernels TARGET WIDTH DTYPE [--packed] [--all-configs]

prints one JSON object per compiled kernel. Triton gets a driver that describes the target and has no device, so that
flash-linear-attention picks its configurations as on that GPU; then the backend is called as a user calls it, forwards and
backwards, and each launch becomes a compilation.

By default the autotuner's configurations are compiled until one fits; ``--all-configs`` compiles them all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from efla.bench.gpu.device import install_driver
from efla.bench.gpu.resources import Resources, read_resources
from efla.bench.gpu.targets import Target, get_target
from efla.scans.types import ScanRequest


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel in one configuration: what it uses, or ``problem``, why it cannot run on the target.

    Configurations with one ``launch`` number are alternatives.
    """

    launch: int
    target: str
    width: int
    dtype: str
    operation: str
    kernel: str
    config: str
    warps: int
    stages: int
    shared: int
    registers: int
    spilled: int
    seconds: float
    problem: str | None


# Rule -> whether it decays, and whether it erases nothing, what it writes, or something else. With these every operation
# is reached, and every kernel of it.
RULES: dict[str, tuple[bool, str | None]] = {
    "linear": (False, None),
    "ssd": (True, None),
    "efla": (False, "write"),
    "gated_delta": (True, "write"),
    "gated_efla": (True, "other"),
}


def requests(width: int, dtype: torch.dtype, packed: bool) -> list[tuple[ScanRequest, bool]]:
    """Requests, and whether they are differentiated: each rule in training and in decoding."""
    found = []
    for has_decay, erase in RULES.values():
        for differentiable in (True, False):
            length = 256 if differentiable else 1
            cu_seqlens = torch.tensor([0, length // 2, length]) if packed and differentiable else None
            with_state = packed or not differentiable
            found.append((_request(width, dtype, length, has_decay, erase, cu_seqlens, with_state), differentiable))
    return found


def _request(
    width: int,
    dtype: torch.dtype,
    length: int,
    has_decay: bool,
    erase: str | None,
    cu_seqlens: Tensor | None,
    with_state: bool,
) -> ScanRequest:
    heads = 4
    q, k, v = (torch.zeros(1, length, heads, width, dtype=dtype, requires_grad=True) for _ in range(3))
    log_decay, other, write = (torch.zeros(1, length, heads, requires_grad=True) for _ in range(3))
    num_sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    return ScanRequest(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay if has_decay else None,
        erase={None: None, "write": write, "other": other}[erase],
        write=write,
        scale=width**-0.5,
        initial_state=torch.zeros(num_sequences, heads, width, width, requires_grad=True) if with_state else None,
        cu_seqlens=cu_seqlens,
        chunk_size=64,
    )


class _Recorder:
    """Stands where Triton would launch: compiles, and reports what has not been seen before."""

    def __init__(self, target: Target, width: int, dtype: str, report: Callable[[CompiledKernel], None]) -> None:
        self.target, self.width, self.dtype, self.report = target, width, dtype, report
        self.operation = ""
        self.launch = 0
        self.seen: dict[int, bool] = {}

    def compile(self, function: Any, compile_one: Callable[[], Any], config: str) -> bool:
        """Compile one configuration; whether it fits the target."""
        start = time.perf_counter()
        problem, kernel = None, None
        resources = Resources(0, 0, 0, 0, 0)
        try:
            kernel = compile_one()
            if id(kernel) in self.seen:
                return self.seen[id(kernel)]
            resources = read_resources(kernel, self.target)
            problem = resources.excess(self.target)
        except Exception as error:
            # Whatever the compiler raises is the finding: the other kernels are still to be compiled.
            problem = f"{type(error).__name__}: {str(error).strip()[:300]}"
        seconds = time.perf_counter() - start
        self.report(
            CompiledKernel(
                launch=self.launch,
                target=self.target.name,
                width=self.width,
                dtype=self.dtype,
                operation=self.operation,
                kernel=function.__name__,
                config=config,
                **resources._asdict(),
                seconds=round(seconds, 2),
                problem=problem,
            )
        )
        if kernel is not None:
            self.seen[id(kernel)] = problem is None  # Triton's cache keeps the kernel, so that its id stays its own
        return problem is None


def install_recorder(recorder: _Recorder, all_configs: bool) -> None:
    """Turn launches into compilations."""
    from fla.ops.utils.cache import CachedAutotuner
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    compile_or_launch = JITFunction.run
    tuning = False

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        def compile_one() -> Any:
            return compile_or_launch(self, *args, grid=grid, warmup=True, **options)

        if tuning:
            return compile_one()
        recorder.launch += 1
        return recorder.compile(self, compile_one, "")

    def tune(self: Any, *args: Any, **options: Any) -> None:
        nonlocal tuning
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        tuning = True
        recorder.launch += 1
        try:
            for config in self.prune_configs(options):

                def compile_one(config: Any = config) -> Any:
                    return self.fn.run(*args, **options, **config.all_kwargs())

                described = ", ".join(f"{key} {value}" for key, value in config.kwargs.items())
                if recorder.compile(self.base_fn, compile_one, described) and not all_configs:
                    return
        finally:
            tuning = False

    JITFunction.run = run
    Autotuner.run = CachedAutotuner.run = tune


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
    recorder = _Recorder(
        target, options.width, options.dtype, lambda kernel: print(json.dumps(asdict(kernel)), flush=True)
    )
    install_recorder(recorder, options.all_configs)

    from efla.scans.backends.fla.operations import choose_operation, run

    for request, differentiable in requests(options.width, getattr(torch, options.dtype), options.packed):
        recorder.operation = choose_operation(request, differentiable).name
        with torch.set_grad_enabled(differentiable):
            o, final_state = run(request, differentiable)
        if differentiable:
            torch.autograd.backward([o, final_state], [torch.zeros_like(o), torch.zeros_like(final_state)])


if __name__ == "__main__":
    main()
