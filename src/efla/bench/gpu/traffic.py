"""Bytes a call moves through a GPU's memory, counted launch by launch; run as a process of its own.

    python -m efla.bench.gpu.traffic WIDTH

prints one JSON object per rule: bytes per token and head, forwards and backwards. Every kernel the backend would launch is
counted as reading and writing each of its tensors once, and so is every torch operation around them. Blocks that a kernel
reads again are left to the cache, so that this is the least traffic these kernels can have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from efla.bench.gpu.device import accept_cpu_tensors, install_driver
from efla.bench.gpu.targets import TARGETS

RULES = ("delta", "efla", "gated_delta", "gated_efla", "gated_efla_log", "ssd")


@dataclass(frozen=True)
class Traffic:
    """Bytes per token and head of one rule: in the Triton kernels, and in the torch operations around them."""

    rule: str
    operation: str
    width: int
    forward_kernels: float
    forward_around: float
    backward_kernels: float
    backward_around: float

    @property
    def forward(self) -> float:
        return self.forward_kernels + self.forward_around

    @property
    def training(self) -> float:
        return self.forward + self.backward_kernels + self.backward_around


class _Counter(TorchDispatchMode):
    """Counts the bytes of what torch operations read and write; views move nothing, fresh memory is counted when filled."""

    def __init__(self) -> None:
        super().__init__()
        self.around = 0
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "alias")):
            self.around += total_bytes([*tree_leaves((args, kwargs)), *tree_leaves(result)])
        return result

    def take(self) -> tuple[int, int]:
        taken = self.kernels, self.around
        self.kernels = self.around = 0
        return taken


def total_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors, each counted once."""
    tensors = {(x.data_ptr(), x.numel()): x for x in values if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def count(rule: str, width: int, counter: _Counter, *, length: int = 4096, heads: int = 4) -> Traffic:
    """The traffic of one rule in bfloat16, by the public function, forwards and backwards, as in training."""
    import efla

    q, k, v = (torch.zeros(1, length, heads, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    beta, log_gate = (torch.zeros(1, length, heads, requires_grad=True) for _ in range(2))
    update_rule = efla.rules.get(rule)
    with counter:
        o, _ = efla.linear_attention(
            q, k, v, beta, log_gate if update_rule.needs_gate else None, rule=rule, backend="fla"
        )
        forward = counter.take()
        o.backward(torch.zeros_like(o))
        backward = counter.take()
    per_token = [x / (length * heads) for x in (*forward, *backward)]
    return Traffic(rule, _operation(rule), width, *per_token)


def _operation(rule: str) -> str:
    names = {"delta": "chunk_delta_rule", "efla": "chunk_delta_rule", "ssd": "chunk_simple_gla"}
    return names.get(rule, "chunk_gated_delta_rule" if rule == "gated_delta" else "chunk_comba")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("width", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    install_driver(TARGETS["sm_90"])
    from fla.ops.utils.cache import CachedAutotuner
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    counter = _Counter()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counter.kernels += total_bytes([*args, *kwargs.values()])

    def tune(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        self.fn.run(*args, **kwargs, **self.prune_configs(kwargs)[0].all_kwargs())

    JITFunction.run = launch
    Autotuner.run = CachedAutotuner.run = tune
    accept_cpu_tensors()
    for rule in RULES:
        print(json.dumps(asdict(count(rule, options.width, counter))), flush=True)


if __name__ == "__main__":
    main()
