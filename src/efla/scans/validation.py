"""Checks of the caller's input; each error says what was expected, what came and what to do.

Shapes, dtypes and devices are checked unless validation is switched off. Values (beta >= 0, log_gate <= 0, sane
cu_seqlens) are checked where looking at them needs no device synchronisation; see :func:`set_validation`.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efla.errors import LayoutWarning, unknown_name
from efla.rules import UpdateRule
from efla.rules import names as rule_names

_LEVELS = ("off", "auto", "full")
_level = "auto"
enabled = True
"""Whether anything is checked at all."""

CHUNK_SIZES = (16, 32, 64, 128, 256)


def set_validation(level: str) -> None:
    """How much of the input is checked: "off" nothing, "auto" values on the CPU only, "full" values on every device.

    The environment variable ``EFLA_VALIDATION`` sets the level at start.
    """
    global _level, enabled
    if level not in _LEVELS:
        raise unknown_name("validation level", level, _LEVELS)
    _level, enabled = level, level != "off"


@contextlib.contextmanager
def validation(level: str) -> Iterator[None]:
    """Context manager form of :func:`set_validation`."""
    previous = _level
    set_validation(level)
    try:
        yield
    finally:
        set_validation(previous)


set_validation(os.environ.get("EFLA_VALIDATION", "auto"))


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor has values to look at: not while tracing, not on the meta device, not a fake tensor."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def checks_values(tensor: Tensor) -> bool:
    """Whether the values of this tensor are checked: on an accelerator only when asked."""
    if not enabled or not has_values(tensor):
        return False
    return _level == "full" or tensor.device.type == "cpu"


def warn_about_layout(k: Tensor) -> None:
    """Warn if k looks head-major, [B, H, T, K]: it has more heads than tokens."""
    length, num_heads = k.shape[1:3]
    if enabled and 1 < length < num_heads and not torch.compiler.is_compiling():
        warnings.warn(
            f"k has shape {_shape(k)}: {length} tokens, fewer than its {num_heads} heads. Inputs are token-major, "
            "[B, T, H, D]; if these are head-major, pass x.transpose(1, 2)",
            LayoutWarning,
            stacklevel=3,
        )


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        hint = f"; write rule={x!r}" if isinstance(x, str) and x in rule_names() else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{hint}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, T, H, D], got {_shape(x)}; inputs are token-major.")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}; convert it with {name}.float()")
        if x.device != k.device:
            raise ValueError(f"q, k and v must be on one device, got {name} on {x.device} and k on {k.device}")
        if x.dtype != k.dtype:
            raise TypeError(f"q, k and v must have one dtype, got {name} {x.dtype} and k {k.dtype}")
    if k.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise TypeError(f"q, k and v must be float64, float32, bfloat16 or float16, got {k.dtype}")
    if q.shape != k.shape:
        raise ValueError(f"q must have k's shape [B, T, Hk, K] = {_shape(k)}, got {_shape(q)}; inputs are token-major.")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v must have k's batch and length [B, T] = {list(k.shape[:2])}, got {list(v.shape[:2])}; "
            "inputs are token-major."
        )
    if k.shape[2] == 0 or v.shape[2] == 0 or v.shape[2] % k.shape[2]:
        raise ValueError(f"the number of v's heads must be a multiple of k's {k.shape[2]} heads, got {v.shape[2]}")
    if 0 in k.shape[3:] + v.shape[3:]:
        raise ValueError(f"head widths must be positive, got K = {k.shape[3]} and V = {v.shape[3]}")


def check_scalar(name: str, x: Tensor, v: Tensor) -> None:
    """A scalar per token and value head: [B, T, Hv]."""
    check_tensor(name, x)
    if x.shape != v.shape[:3]:
        raise ValueError(
            f"{name} must have shape [B, T, H] = {list(v.shape[:3])} to match v, got {_shape(x)}; inputs are token-major."
        )
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.device != v.device:
        raise ValueError(f"{name} must be on v's device {v.device}, got {x.device}")


def check_rule_inputs(rule: UpdateRule, beta: Tensor | None, log_gate: Tensor | None, v: Tensor) -> None:
    for name, x, is_needed in (("beta", beta, rule.needs_beta), ("log_gate", log_gate, rule.needs_gate)):
        if is_needed and x is None:
            raise ValueError(f"rule {rule.name!r} needs {name} of shape [B, T, H] = {list(v.shape[:3])}, got None")
        if x is not None:
            check_tensor(name, x)
        if not is_needed and x is not None:
            has_gated = name == "log_gate" and rule.name in ("delta", "efla")
            gated = f" or use rule 'gated_{rule.name}'" if has_gated else ""
            raise ValueError(f"rule {rule.name!r} takes no {name}, got one of shape {_shape(x)}; leave it out{gated}")
        if x is not None:
            check_scalar(name, x, v)


def check_domain(beta: Tensor | None, log_gate: Tensor | None) -> None:
    """Refuse values outside every rule's domain, where values are checked; the native kernels check them in passing."""
    if beta is not None and checks_values(beta) and bool((beta < 0).any()):
        raise ValueError(f"beta must be >= 0, got {float(beta.min()):.6g}; pass it through a sigmoid or softplus")
    if log_gate is not None and checks_values(log_gate) and bool((log_gate > 0).any()):
        raise ValueError(
            f"log_gate must be <= 0 (the logarithm of a gate in (0, 1]), got {float(log_gate.max()):.6g}; "
            "pass it through logsigmoid, or negate a decay rate"
        )


def check_call(
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    chunk_size: int,
    qk_l2norm: object = False,
) -> None:
    if scale is not None and has_values(k) and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}; leave it out for K**-0.5")
    if not isinstance(qk_l2norm, bool) and qk_l2norm not in ("q", "k"):
        raise TypeError(f"qk_l2norm must be True, False, 'q' or 'k', got {qk_l2norm!r}")
    num_sequences = k.shape[0]
    if cu_seqlens is not None:
        num_sequences = _check_cu_seqlens(cu_seqlens, k)
    if initial_state is not None:
        check_tensor("initial_state", initial_state)
        expected = [num_sequences, v.shape[2], k.shape[3], v.shape[3]]
        if list(initial_state.shape) != expected:
            raise ValueError(f"initial_state must have shape [N, Hv, K, V] = {expected}, got {_shape(initial_state)}")
        if initial_state.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"initial_state must be float32 or float64, got {initial_state.dtype}; "
                "a half-precision memory loses what it stores"
            )
        if initial_state.device != v.device:
            raise ValueError(f"initial_state must be on v's device {v.device}, got {initial_state.device}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {', '.join(map(str, CHUNK_SIZES))}, got {chunk_size}")


def _check_cu_seqlens(cu_seqlens: Tensor, k: Tensor) -> int:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1 sequences, got {_shape(cu_seqlens)}")
    if k.shape[0] != 1:
        raise ValueError(f"with cu_seqlens the sequences are packed into one row: B must be 1, got {k.shape[0]}")
    if checks_values(cu_seqlens):
        boundaries = cu_seqlens.tolist()
        if boundaries[0] != 0 or boundaries[-1] != k.shape[1] or any(b < a for a, b in pairwise(boundaries)):
            raise ValueError(
                f"cu_seqlens must start at 0, never decrease and end at T = {k.shape[1]}, got {_excerpt(boundaries)}"
            )
    return cu_seqlens.shape[0] - 1


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _excerpt(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}]"
