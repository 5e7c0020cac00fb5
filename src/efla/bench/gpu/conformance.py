"""The fla backend against the float64 oracle: every rule, shape, width and dtype, values and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from efla import rules, testing
from efla.bench.gpu.honest import honest_call
from efla.scans.backends import get_backend
from efla.scans.backends.fla.requirements import interpreted
from efla.scans.types import compute_dtype

# id -> arguments of efla.testing.make_inputs.
SHAPES: dict[str, dict[str, Any]] = {
    "ragged, with state": {"batch": 1, "length": 100, "initial_state": True},
    "packed": {"packed": [1, 63, 64, 0, 65], "initial_state": True},
    "grouped heads": {"batch": 1, "length": 70, "key_heads": 1, "value_heads": 2},
    "L2 norm": {"batch": 1, "length": 70, "qk_l2norm": True},
    "decoding": {"batch": 3, "length": 1, "initial_state": True},
}
WIDTHS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CaseResult:
    """One case: its worst tensor, or ``skipped``, why the backend does not take it."""

    rule: str
    shape: str
    width: int
    dtype: str
    worst: str = ""
    error: float = 0.0
    budget: float = 0.0
    problem: str | None = None
    skipped: str | None = None


def find_device() -> str | None:
    """Where the backend's tensors live here: the GPU's device type, "cpu" in Triton's interpreter, or ``None``."""
    if interpreted():
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else None


def check_case(
    inputs: testing.ScanInputs,
    *,
    backend: str | Callable[[testing.ScanInputs], tuple[Tensor, Tensor]] = "fla",
    gradients: bool = True,
) -> dict[str, testing.Deviation]:
    """Error and budget of the output, the final state and each gradient. The budget is that of :mod:`efla.bench.gpu.honest`."""
    actual = testing.run(inputs, backend, gradients=gradients)
    honest = testing.run(inputs, honest_call, gradients=gradients)
    expected = testing.oracle(inputs, gradients=gradients)
    return {
        name: testing.deviation(actual[name], truth, honest[name], precision=inputs.v.dtype)
        for name, truth in expected.items()
    }


def self_check() -> None:
    """A few cases on this machine's device, in some seconds; raises AssertionError with what is wrong."""
    device = find_device()
    assert device is not None, "there is no GPU"
    dtype = torch.float32 if interpreted() else torch.bfloat16
    for rule, shape in (("efla", "ragged, with state"), ("gated_efla", "packed"), ("delta", "L2 norm")):
        inputs = testing.make_inputs(rule, dtype=dtype, device=device, **SHAPES[shape])
        wrong = {name: str(found) for name, found in check_case(inputs).items() if not found.is_within}
        assert not wrong, f"{rule}, {shape}: {wrong}"


def num_cases(widths: tuple[int, ...] = WIDTHS) -> int:
    return len(DTYPES) * len(widths) * len(rules.names()) * len(SHAPES)


def run_cases(device: str, widths: tuple[int, ...] = WIDTHS) -> Iterator[CaseResult]:
    """All cases on a device, one at a time."""
    for dtype in DTYPES:
        for width in widths:
            for rule in rules.names():
                for shape, arguments in SHAPES.items():
                    yield _run_case(rule, shape, arguments, width, dtype, device)


def _run_case(
    rule: str, shape: str, arguments: dict[str, Any], width: int, dtype: torch.dtype, device: str
) -> CaseResult:
    case = {"rule": rule, "shape": shape, "width": width, "dtype": str(dtype).removeprefix("torch.")}
    inputs = testing.make_inputs(rule, key_dim=width, value_dim=width, dtype=dtype, device=device, **arguments)
    reason = get_backend("fla").supports(inputs.k, inputs.v, compute_dtype(inputs.k))
    if reason is not None:
        return CaseResult(**case, skipped=reason)  # type: ignore[arg-type]
    try:
        found = check_case(inputs, gradients=shape != "decoding")
    except Exception as failure:
        # A kernel that does not even run is this case's result; the others are still to be tried.
        return CaseResult(**case, problem=f"{type(failure).__name__}: {str(failure).strip()[:200]}")  # type: ignore[arg-type]
    worst = max(found, key=lambda name: found[name].error / found[name].budget + found[name].not_finite)
    problem = "; ".join(f"{name}: {deviation}" for name, deviation in found.items() if not deviation.is_within)
    error, budget, _ = found[worst]
    return CaseResult(**case, worst=worst, error=error, budget=budget, problem=problem or None)  # type: ignore[arg-type]
