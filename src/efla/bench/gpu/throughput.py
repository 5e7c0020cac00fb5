"""The throughput grid on a GPU: tokens per second of each rule in forward pass, training and decoding, relative to DeltaNet."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from efla.bench.scan import Size, Work, attention_call
from efla.runs.timing import compare

RULES = ("delta", "efla", "gated_delta", "gated_efla", "ssd")
WIDTHS = (64, 128, 256)
LENGTHS = (2048, 8192)
MODEL_WIDTH = 2048  # heads times head width, as in a model of about a billion parameters
TOKENS = 16384  # per call, so that short and long sequences do the same work
DECODING_BATCH = 64


@dataclass(frozen=True)
class RuleThroughput:
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
) -> Iterator[RuleThroughput]:
    """Time forward pass, training and one decoding step; every rule takes its turn in every round."""
    for width in widths:
        heads = max(1, model_width // width)
        work: list[tuple[Work, Size]] = [
            (name, Size(tokens // length, length, heads, width))
            for length in lengths
            for name in ("forward", "training")
        ]
        for name, size in [*work, ("decoding", Size(DECODING_BATCH, 1, heads, width))]:
            calls = {rule: attention_call(size, rule, backend, work=name, dtype=dtype, device=device) for rule in RULES}
            for call in calls.values():  # compiles and tunes the kernels
                call()
            timed = {rule: _synchronized(call, device) for rule, call in calls.items()}
            seconds = {m.contender: m.median for m in compare(name, timed, threads=1, rounds=rounds)}
            for rule, median in seconds.items():
                rate = size.batch * size.length / median / 1e6
                yield RuleThroughput(name, rule, width, size.length, rate, seconds["delta"] / median)


def _synchronized(call: Callable[[], object], device: str) -> Callable[[], None]:
    """The call, which then waits for the device to finish."""

    def synchronized() -> None:
        call()
        if device != "cpu":
            torch.accelerator.synchronize()

    return synchronized
