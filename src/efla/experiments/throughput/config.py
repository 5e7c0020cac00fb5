"""Settings and command-line options of the throughput measurement: models, lengths, batches, rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from efla.errors import check_names
from efla.experiments.experiment import Options
from efla.experiments.lm.config import ARM_ORDER
from efla.models import presets
from efla.models.loading import choose_device
from efla.runs.records import GRID, Count, check_fields

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig

Profile = Literal["quick", "full"]
Size = Literal["quick", "full", "340m", "1.3b"]
Precision = Literal["float32", "bfloat16"]
# Ours and theirs. The paper's figure is about the throughput of the first over that of the second.
PAIRS = {"exact-flow": "delta-l2", "gated-exact-flow": "gated-delta"}
ARMS = ARM_ORDER[:6]
# Device and profile -> size, tokens per step, lengths, rounds.
_PROFILES: dict[tuple[str, Profile], tuple[Size, int, tuple[int, ...], int]] = {
    ("cpu", "quick"): ("quick", 2_048, (256, 1_024), 7),
    ("cpu", "full"): ("full", 8_192, (512, 1_024, 2_048, 4_096, 8_192), 15),
    ("cuda", "quick"): ("340m", 16_384, (2_048, 16_384), 7),
    ("cuda", "full"): ("340m", 32_768, (2_048, 4_096, 8_192, 16_384, 32_768), 15),
}


class Shape(NamedTuple):
    """The shape of a batch: tokens per row, and rows."""

    length: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """Training steps of all arms in turn. A cell is one length and batch."""

    profile: str
    size: Size
    """quick and full: the CPU sizes over bytes. 340m and 1.3b: the paper's sizes."""
    arms: tuple[str, ...] = ARMS
    rounds: Count
    device: str = "cpu"
    precision: Precision = "float32"
    backend: str = "auto"
    settings: tuple[Shape, ...] = field(metadata=GRID)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(Shape(*shape) for shape in self.settings))
        check_fields(self)
        check_names("arm", self.arms, ARM_ORDER)
        for shape in self.settings:
            if shape.length < 2 or shape.batch < 1:
                raise ValueError(f"a batch needs at least 1 row of at least 2 tokens, got {shape}")

    def model_config(self, arm: str) -> EflaConfig:
        """The config of the model that is timed for an arm."""
        return presets.arm(arm, self.size, backend=self.backend)


def shapes_of(tokens: int, lengths: tuple[int, ...]) -> tuple[Shape, ...]:
    """Batches of ``tokens`` tokens in rows of each length."""
    for length in lengths:
        if tokens % length:
            raise ValueError(
                f"rows of {length} tokens do not divide {tokens} tokens per step; change --lengths or --tokens"
            )
    return tuple(Shape(length, tokens // length) for length in lengths)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(Options):
    """Training tokens per second of every arm over lengths and batches. Run nothing else meanwhile."""

    profile: Profile = "quick"
    """quick: a minute. full: about ten minutes. On a GPU both time the paper's 340M models."""
    size: Size | None = None
    """Size of the models instead of the profile's: quick, full (over bytes), 340m or 1.3b (the paper's)."""
    arms: tuple[str, ...] = ARMS
    """Arms to time in turn."""
    tokens: int | None = None
    """Tokens per step instead of the profile's, for every length."""
    lengths: tuple[int, ...] | None = None
    """Lengths of rows instead of the profile's."""
    rounds: int | None = None
    """How often each arm is timed per length."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    precision: Precision | None = None
    """Precision of training (default: float32 on a CPU, bfloat16 autocast on a GPU)."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""

    def config(self) -> ThroughputConfig:
        device = choose_device(self.device).type
        size, tokens, lengths, rounds = _PROFILES[device, self.profile]
        return ThroughputConfig(
            profile=self.profile,
            size=self.size or size,
            arms=self.arms,
            rounds=self.rounds or rounds,
            device=device,
            precision=self.precision or ("bfloat16" if device == "cuda" else "float32"),
            backend=self.backend,
            settings=shapes_of(self.tokens or tokens, self.lengths or lengths),
        )
