"""Timing of several contenders in turn, so that other load on the machine affects all of them equally."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import nn

Calls = Mapping[str, Callable[[], object]]
"""Contenders, the ways to do a piece of work, by name."""


@dataclass(frozen=True)
class Measurement:
    """Seconds per call of one contender: median and quartiles over the rounds."""

    work: str
    contender: str
    threads: int
    median: float
    low: float
    high: float
    rounds: int
    useful_flops: float | None = None
    items: float | None = None
    """Images, tokens or other items per call."""
    scan_share: float | None = None
    """Share of the time spent in scans, if measured."""
    memory: float | None = None
    """Bytes that a call needs at its peak beside its arguments, if measured."""

    @property
    def per_second(self) -> float | None:
        return None if self.items is None else self.items / self.median

    @property
    def gflops(self) -> float | None:
        """Useful operations per second; extra work of an implementation does not count."""
        return None if self.useful_flops is None else self.useful_flops / self.median / 1e9

    def as_row(self) -> dict[str, object]:
        return {**asdict(self), "gflops": self.gflops, "per_second": self.per_second}


def samples_in_turn(
    calls: Calls,
    rounds: int,
    *,
    repeats: int = 1,
    sample_seconds: float = 0.0,
    alternate: bool = False,
    done: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of every contender in every round, after an unmeasured round.

    repeats: calls in a sample, for very short work, at least; sample_seconds: minimum duration of a sample. alternate:
    reverse the order in every other round. done: called with the number of finished rounds.
    """
    times = {name: max(repeats, _calls_in(call, sample_seconds)) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(rounds):
        for name in reversed(list(calls)) if alternate and number % 2 else calls:
            start = time.perf_counter()
            for _ in range(times[name]):
                calls[name]()
            samples[name].append((time.perf_counter() - start) / times[name])
        if done is not None:
            done(number + 1)
    return samples


@torch.no_grad()
def compare(
    work: str,
    calls: Calls,
    *,
    rounds: int,
    threads: int | None = None,
    repeats: int = 1,
    useful_flops: float | None = None,
    flops_of: dict[str, float] | None = None,
    items: float | None = None,
    sample_seconds: float = 0.0,
) -> list[Measurement]:
    """Time all contenders for ``rounds`` rounds in turn, in reverse order every other round, after an unmeasured round.

    Gradients are disabled; a contender that needs them enables them. threads: what they use, default torch's number.
    sample_seconds: minimum duration of a sample.
    Shorter work is repeated, so that the caches left by the previous contender do not matter.
    """
    threads = torch.get_num_threads() if threads is None else threads
    samples = samples_in_turn(calls, rounds, repeats=repeats, sample_seconds=sample_seconds, alternate=True)
    measurements = []
    for name, times in samples.items():
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        flops = (flops_of or {}).get(name, useful_flops)
        measurements.append(
            Measurement(work, name, threads, statistics.median(times), quartiles[0], quartiles[2], rounds, flops, items)
        )
    return measurements


def _calls_in(call: Callable[[], object], seconds: float) -> int:
    """How many calls take this long."""
    if not seconds:
        return 1
    call()
    start = time.perf_counter()
    call()
    return math.ceil(seconds / (time.perf_counter() - start))


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], *, clip: float | None = None
) -> Callable[[], float]:
    """One training step as a callable for benchmarks: forward, backward, clipping, optimizer. A call returns the loss.

    loss: runs the forward pass. clip: global gradient norm; ``None`` leaves gradients as they are.
    """

    @torch.enable_grad()
    def step() -> float:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return float(value.detach())

    return step


def seconds_per_call(call: Callable[[], object], threads: int | None = None) -> float:
    """The faster of two calls after one that is not counted, with that many torch threads."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    try:
        (times,) = samples_in_turn({"": call}, 2).values()
    finally:
        torch.set_num_threads(threads_before)
    return min(times)
