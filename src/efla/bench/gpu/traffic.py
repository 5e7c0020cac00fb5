"""Bytes that a call moves through GPU memory, counted per launch, and the throughput bound they imply.

    python -m efla.bench.gpu.traffic WIDTH

prints one JSON object per rule: bytes per token and head in the forward and the backward pass. Each kernel the backend
would launch counts as reading and writing each of its tensors once, and so does each torch operation around it. Repeated
reads are assumed to hit the cache, so this is the minimum traffic of these kernels.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import efla
from efla.bench.gpu import run_module
from efla.bench.gpu.target import TARGETS, install_driver, replace_launches
from efla.scans.backends import fla

RULES = ("delta", "efla", "gated_delta", "gated_efla", "gated_efla_log", "ssd")
BANDWIDTHS = {"A100 80 GB SXM": 2.039e12, "H100 80 GB SXM": 3.35e12}
"""Published peak memory bandwidth of each GPU, in bytes per second."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per token and head of one rule, in the Triton kernels and in the torch operations around them."""

    rule: str
    operation: str
    width: int
    forward_kernels: float
    forward_around: float
    backward_kernels: float
    backward_around: float

    @property
    def training(self) -> float:
        return self.forward_kernels + self.forward_around + self.backward_kernels + self.backward_around

    def training_bound(self, gpu: str) -> float:
        """Tokens times heads per second in training if memory bandwidth were the only limit."""
        return BANDWIDTHS[gpu] / self.training


def count_traffic(widths: tuple[int, ...]) -> list[Traffic]:
    """Bytes per token and head of each rule and width."""
    return [Traffic(**row) for width in widths for row in run_module("efla.bench.gpu.traffic", str(width))]


class _Counter(TorchDispatchMode):
    """Counts the bytes that torch operations read and write. Views move nothing; new memory counts when it is filled."""

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

    def pop(self) -> tuple[int, int]:
        counts = self.kernels, self.around
        self.kernels = self.around = 0
        return counts


def total_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors, each counted once."""
    tensors = {(x.data_ptr(), x.numel()): x for x in values if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def count(rule: str, width: int, counter: _Counter, *, length: int = 4096, heads: int = 4) -> Traffic:
    """Traffic of one rule in bfloat16: forward and backward pass of the public function, as in training."""
    q, k, v = (torch.zeros(1, length, heads, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    beta, log_gate = (torch.zeros(1, length, heads, requires_grad=True) for _ in range(2))
    update_rule = efla.rules.get(rule)
    with counter:
        o, _ = efla.linear_attention(
            q, k, v, beta, log_gate if update_rule.needs_gate else None, rule=rule, backend="fla"
        )
        forward = counter.pop()
        o.backward(torch.zeros_like(o))
        backward = counter.pop()
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
    counter = _Counter()

    def launch(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counter.kernels += total_bytes([*args, *kwargs.values()])

    def tune(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        tuner.fn.run(*args, **kwargs, **tuner.prune_configs(kwargs)[0].all_kwargs())

    replace_launches(launch, tune)
    # The tensors are on the CPU; the backend treats them as if they were on the target.
    fla.BACKEND.unavailable = lambda: None
    fla.BACKEND.supports = lambda k, v, dtype: None
    for rule in RULES:
        print(json.dumps(asdict(count(rule, options.width, counter))), flush=True)


if __name__ == "__main__":
    main()
