"""Settings and command-line options of the exactness study."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from efla.errors import check_names
from efla.experiments.experiment import Options
from efla.runs.records import GRID, Count, Minimum, check_fields

# The rules that discretise a delta-rule flow, in the order of the legend. (`linear` and `ssd` erase nothing.)
RULES = (
    "delta", "rk2", "rk4", "implicit_euler", "crank_nicolson", "efla", "gated_delta", "gated_efla", "gated_efla_log",
)  # fmt: skip
UNGATED = RULES[:6]
STUDIES = ("order", "stability", "memory")


@dataclass(frozen=True, kw_only=True)
class ExactnessConfig:
    """A token is one step of size x = beta * lam. The study varies x and compares each rule with its flow."""

    rules: tuple[str, ...] = field(default=RULES, metadata=GRID)
    width: Count = 16
    """K = V."""
    draws: Count
    """Random tokens (S, k, v) per point of the error curve, which shows their median."""
    points: Annotated[int, Minimum(2)]
    """Step sizes on the error curve, from 1e-4 to 1e2."""
    tokens: int = 256
    """Length of the sequence whose memory is followed."""
    seeds: Count
    """Sequences per point of the memory curves, which show their median."""
    burst_start: int = 96
    burst_tokens: int = 16
    burst_energy: float = 12.0
    """lam of the energetic keys; the others have lam = 1."""
    beta: float = 0.5
    gate: float = 0.99

    def __post_init__(self) -> None:
        check_fields(self)
        if self.burst_start + self.burst_tokens > self.tokens:
            raise ValueError(
                f"the burst must end within the sequence of {self.tokens} tokens, got a burst of {self.burst_tokens} "
                f"tokens from token {self.burst_start}"
            )


PROFILES = {
    "quick": ExactnessConfig(draws=5, points=61, seeds=5),
    "full": ExactnessConfig(draws=25, points=121, seeds=25),
}


def profile(name: str) -> ExactnessConfig:
    """The config of a profile."""
    check_names("profile", [name], PROFILES)
    return PROFILES[name]


@dataclass(frozen=True, kw_only=True)
class ExactnessOptions(Options):
    """Every rule against the true flow: error, stability, the memory under energetic keys. Takes seconds."""

    profile: Literal["quick", "full"] = "quick"
    """quick: 5 draws a point; full: 25."""
    rules: tuple[str, ...] | None = None
    """Rules to study instead of all nine."""

    def config(self) -> ExactnessConfig:
        return replace(profile(self.profile), **self.given("rules"))
