"""The throughput grid on a GPU: tokens per second of each rule, forwards and in training, next to DeltaNet's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import efla
from efla.runs.timing import Contender, compare

RULES = ("delta", "efla", "gated_delta", "gated_efla", "ssd")
WIDTHS = (64, 128, 256)
LENGTHS = (2048, 8192)
MODEL_WIDTH = 2048  # heads times head width, as in a model of about a billion parameters
TOKENS = 16384  # per call, so that short and long sequences do the same work


@dataclass(frozen=True)
class Throughput:
    """Millions of tokens per second, the median of the rounds."""

    work: str
    rule: str
    width: int
    length: int
    million_tokens: float
    against_delta: float


def run_grid(
    device: str,
    *,
    widths: tuple[int, ...] = WIDTHS,
    lengths: tuple[int, ...] = LENGTHS,
    tokens: int = TOKENS,
    model_width: int = MODEL_WIDTH,
    rounds: int = 10,
    backend: str = "fla",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Throughput]:
    """Forward, forward and backward, and one step of decoding; every rule in turn in every round."""
    for width in widths:
        heads = max(1, model_width // width)
        for length in lengths:
            for work in ("forward", "training"):
                calls = {
                    rule: _call(rule, work, tokens // length, length, heads, width, device, dtype, backend)
                    for rule in RULES
                }
                yield from _measure(work, calls, tokens // length * length, width, length, rounds, device)
        calls = {rule: _call(rule, "decoding", 64, 1, heads, width, device, dtype, backend) for rule in RULES}
        yield from _measure("decoding", calls, 64, width, 1, rounds, device)


def _measure(
    work: str,
    calls: dict[str, Callable[[], object]],
    tokens: int,
    width: int,
    length: int,
    rounds: int,
    device: str,
) -> Iterator[Throughput]:
    for call in calls.values():  # compiles and tunes the kernels
        call()
    contenders = [Contender(rule, _finished(call, device)) for rule, call in calls.items()]
    seconds = {m.contender: m.median for m in compare(work, contenders, threads=1, rounds=rounds)}
    for rule, median in seconds.items():
        yield Throughput(work, rule, width, length, tokens / median / 1e6, seconds["delta"] / median)


def _finished(call: Callable[[], object], device: str) -> Callable[[], None]:
    """The call until the device has done its work."""

    def until_done() -> None:
        call()
        if device != "cpu":
            torch.accelerator.synchronize()

    return until_done


def _call(
    rule: str,
    work: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    device: str,
    dtype: torch.dtype,
    backend: str,
) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k, v = (random(batch, length, heads, width) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(batch, length, heads, generator=generator).to(device)
    log_gate = -torch.rand(batch, length, heads, generator=generator).to(device)
    update_rule = efla.rules.get(rule)
    scalars = (beta if update_rule.needs_beta else None, log_gate if update_rule.needs_gate else None)
    state = torch.zeros(batch, heads, width, width, device=device) if work == "decoding" else None
    leaves = [x.requires_grad_() for x in (q, k, v, *scalars) if x is not None] if work == "training" else []

    def forward() -> Tensor:
        o, _ = efla.linear_attention(
            q,
            k,
            v,
            *scalars,
            rule=rule,
            initial_state=state,
            output_final_state=state is not None,
            backend=backend,
        )
        return o

    def train() -> object:
        with torch.enable_grad():
            o = forward()
            return torch.autograd.grad(o, leaves, torch.ones_like(o))

    return train if work == "training" else forward
