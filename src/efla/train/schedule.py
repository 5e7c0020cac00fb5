"""The learning rate of every step in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear from ``start`` to ``peak`` over W warm-up steps, then a cosine to ``final`` at step N (spec lm.md 4).

        t < W:   start + (peak - start) (t + 1) / W
        else:    final + (peak - final) (1 + cos(pi (t - W) / (N - W))) / 2

    t counts from 0; the last step, t = N - 1, stands just before ``final``.
    """

    steps: int
    warmup_steps: int
    peak: float
    start: float
    final: float

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must lie between 0 and steps, and steps be at least 1; got {self.warmup_steps} of {self.steps}"
            )
        if not (min(self.start, self.final) >= 0 and max(self.start, self.final) <= self.peak):
            raise ValueError(
                f"rates must be >= 0 and the peak the largest; got start {self.start}, peak {self.peak}, final {self.final}"
            )

    @classmethod
    def tenth(cls, steps: int, peak: float) -> WarmupCosine:
        """The CPU protocol's: warm-up over a tenth of the steps from peak / 10, cosine to peak / 10 (spec lm.md 7.3)."""
        return cls(steps=steps, warmup_steps=steps // 10, peak=peak, start=peak / 10, final=peak / 10)

    def rate(self, step: int) -> float:
        """The rate of that step, 0-based."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step {step} is outside the schedule's 0 to {self.steps - 1}")
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.final + 0.5 * (self.peak - self.final) * (1 + math.cos(math.pi * share))
