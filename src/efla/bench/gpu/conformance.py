"""Conformance of the fla backend with the float64 oracle: every rule, shape, width and dtype, with all gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from efla import rules, testing
from efla.scans.backends import get_backend
from efla.scans.backends.fla import interpreted
from efla.scans.request import compute_dtype

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
    """One case: its worst tensor, or ``skipped``, why the backend does not support it."""

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
    """The device type of the GPU, "cpu" in Triton's interpreter, or ``None`` without either."""
    if interpreted():
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else None


def check_case(
    inputs: testing.ScanInputs,
    *,
    backend: str | Callable[[testing.ScanInputs], tuple[Tensor, Tensor]] = "fla",
    gradients: bool = True,
) -> dict[str, testing.Deviation]:
    """Error and budget (from :func:`efla.testing.low_precision_reference`) of output, final state and each gradient."""
    actual = testing.run(inputs, backend, gradients=gradients)
    reference = testing.run(inputs, testing.low_precision_reference, gradients=gradients)
    expected = testing.oracle(inputs, gradients=gradients)
    return {
        name: testing.deviation(actual[name], truth, reference[name], precision=inputs.v.dtype)
        for name, truth in expected.items()
    }


def self_check() -> None:
    """Check a few cases on this machine's device in seconds; raises AssertionError if one is wrong."""
    device = find_device()
    assert device is not None, "there is no GPU"
    dtype = torch.float32 if interpreted() else torch.bfloat16
    for rule, shape in (("efla", "ragged, with state"), ("gated_efla", "packed"), ("delta", "L2 norm")):
        inputs = testing.make_inputs(rule, dtype=dtype, device=device, **SHAPES[shape])
        wrong = {name: str(found) for name, found in check_case(inputs).items() if not found.is_within}
        assert not wrong, f"{rule}, {shape}: {wrong}"


def cases(widths: tuple[int, ...] = WIDTHS) -> list[tuple[torch.dtype, int, str, str]]:
    """(dtype, width, rule, shape) of every case."""
    return list(product(DTYPES, widths, rules.names(), SHAPES))


def run_case(dtype: torch.dtype, width: int, rule: str, shape: str, *, device: str) -> CaseResult:
    result = partial(CaseResult, rule, shape, width, str(dtype).removeprefix("torch."))
    inputs = testing.make_inputs(rule, key_dim=width, value_dim=width, dtype=dtype, device=device, **SHAPES[shape])
    reason = get_backend("fla").supports(inputs.k, inputs.v, compute_dtype(inputs.k))
    if reason is not None:
        return result(skipped=reason)
    try:
        found = check_case(inputs, gradients=shape != "decoding")
    except Exception as failure:
        # A kernel that fails to run is a result too; the other cases still run.
        return result(problem=f"{type(failure).__name__}: {str(failure).strip()[:200]}")
    worst = max(found, key=lambda name: found[name].error / found[name].budget + found[name].not_finite)
    problem = "; ".join(f"{name}: {deviation}" for name, deviation in found.items() if not deviation.is_within)
    error, budget, _ = found[worst]
    return result(worst=worst, error=error, budget=budget, problem=problem or None)
