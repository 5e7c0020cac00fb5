"""Settings of the exactness study."""

from __future__ import annotations

from dataclasses import dataclass, field

from efla.errors import unknown_name
from efla.runs.records import GRID

# The rules that discretise a delta-rule flow, in the order of the legend. (`linear` and `ssd` erase nothing.)
RULES = (
    "delta", "rk2", "rk4", "implicit_euler", "crank_nicolson", "efla", "gated_delta", "gated_efla", "gated_efla_log",
)  # fmt: skip
STUDIES = ("order", "stability", "memory")


@dataclass(frozen=True, kw_only=True)
class ExactnessConfig:
    """A token is one step of size x = beta * lam; the study varies x and compares each rule with its flow."""

    rules: tuple[str, ...] = field(default=RULES, metadata=GRID)
    width: int = 16
    """K = V."""
    draws: int
    """Random tokens (S, k, v) behind each point of the error curve; the curve is their median."""
    points: int
    """Step sizes on the error curve, from 1e-4 to 1e2."""
    tokens: int = 256
    """Length of the sequence whose memory is followed."""
    seeds: int
    """Sequences behind each point of the memory curves; the curve is their median."""
    burst_start: int = 96
    burst_tokens: int = 16
    burst_energy: float = 12.0
    """lam of the energetic keys; the others have lam = 1."""
    beta: float = 0.5
    gate: float = 0.99

    def __post_init__(self) -> None:
        if min(self.draws, self.points - 1, self.seeds, self.width) < 1:
            raise ValueError(f"draws, seeds and width must be at least 1 and points at least 2, got {self}")
        if self.burst_start + self.burst_tokens > self.tokens:
            raise ValueError("the burst must end before the sequence does")


PROFILES = {
    "quick": ExactnessConfig(draws=5, points=61, seeds=5),
    "full": ExactnessConfig(draws=25, points=121, seeds=25),
}


def profile(name: str) -> ExactnessConfig:
    """The settings of a profile."""
    if name not in PROFILES:
        raise unknown_name("profile", name, PROFILES)
    return PROFILES[name]
