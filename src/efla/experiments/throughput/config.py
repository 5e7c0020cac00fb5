"""Settings of the throughput measurement: which models, over which lengths and batches, how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from efla.errors import unknown_name
from efla.experiments.lm.config import ARM_ORDER
from efla.models import presets
from efla.runs.records import GRID

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig

Size = Literal["quick", "full", "340m", "1.3b"]
SIZES: tuple[Size, ...] = ("quick", "full", "340m", "1.3b")
Profile = Literal["quick", "full"]
ARMS = ("delta-l2", "exact-flow", "gated-delta", "gated-exact-flow", "mamba2", "attention")
# Ours and theirs: the throughput of the first over that of the second is what the paper's figure is about.
PAIRS = {"exact-flow": "delta-l2", "gated-exact-flow": "gated-delta"}
_PRESETS = {
    "delta-l2": "deltanet",
    "exact-flow": "efla",
    "gated-delta": "gated-deltanet",
    "gated-exact-flow": "gated-efla",
    "mamba2": "mamba2",
    "attention": "transformer",
}


class Setting(NamedTuple):
    """Rows of a step and their length in tokens."""

    length: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """Training steps of all arms in turn; a cell is one length and batch."""

    profile: str
    size: str
    """quick and full: the CPU sizes over bytes; 340m and 1.3b: the paper's."""
    arms: tuple[str, ...] = ARMS
    rounds: int
    device: str = "cpu"
    precision: str = "float32"
    backend: str = "auto"
    settings: tuple[Setting, ...] = field(metadata=GRID)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(Setting(*setting) for setting in self.settings))
        if self.size not in SIZES:
            raise unknown_name("size", self.size, SIZES)
        known = ARM_ORDER if self.size in ("quick", "full") else tuple(_PRESETS)
        for arm in self.arms:
            if arm not in known:
                raise unknown_name(f"arm of size {self.size}", arm, known)
        if self.precision not in ("float32", "bfloat16"):
            raise unknown_name("precision", self.precision, ("float32", "bfloat16"))
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        for setting in self.settings:
            if setting.length < 2 or setting.batch < 1:
                raise ValueError(f"a setting needs rows of at least 2 tokens and at least 1 row, got {tuple(setting)}")

    def model_config(self, arm: str) -> EflaConfig:
        """The model that is timed for an arm."""
        if self.size in ("quick", "full"):
            return presets.arm(arm, self.size, backend=self.backend)
        return presets.get(f"{_PRESETS[arm]}-{self.size}", backend=self.backend)


def settings_of(tokens: int, lengths: tuple[int, ...]) -> tuple[Setting, ...]:
    """Rows of each length, as many as make the same number of tokens a step."""
    for length in lengths:
        if tokens % length:
            raise ValueError(
                f"rows of {length} tokens do not divide {tokens} tokens a step; change --lengths or --tokens"
            )
    return tuple(Setting(length, tokens // length) for length in lengths)
