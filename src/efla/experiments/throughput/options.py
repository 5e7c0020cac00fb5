"""The command line of the throughput measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from efla.experiments.experiment import Options
from efla.experiments.throughput.config import ARMS, Profile, Size, ThroughputConfig, settings_of

# Profile on a CPU or a GPU: size, tokens a step, lengths, rounds.
_CPU = {"quick": ("quick", 2_048, (256, 1_024), 7), "full": ("full", 8_192, (512, 1_024, 2_048, 4_096, 8_192), 15)}
_GPU = {
    "quick": ("340m", 16_384, (2_048, 16_384), 7),
    "full": ("340m", 32_768, (2_048, 4_096, 8_192, 16_384, 32_768), 15),
}


@dataclass(frozen=True, kw_only=True)
class Throughput(Options):
    """Training tokens per second of every arm over lengths and batches; nothing else should run meanwhile."""

    profile: Profile = "quick"
    """quick: a minute; full: some ten minutes. On a GPU both time the paper's 340M models."""
    size: Size | None = None
    """Size of the models instead of the profile's: quick, full (over bytes), 340m or 1.3b (the paper's)."""
    arms: tuple[str, ...] = ARMS
    """Arms to time in turn."""
    tokens: int | None = None
    """Tokens of a step instead of the profile's; every setting has as many."""
    lengths: tuple[int, ...] | None = None
    """Lengths of rows instead of the profile's."""
    rounds: int | None = None
    """How often every arm is timed in a setting."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Default: float32 on a CPU, bfloat16 autocast on a GPU."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""

    def config(self) -> ThroughputConfig:
        """The resolved config."""
        has_gpu = torch.cuda.is_available()
        device = ("cuda" if has_gpu else "cpu") if self.device == "auto" else self.device
        if device == "cuda" and not has_gpu:
            raise RuntimeError("--device cuda: torch finds no GPU here; use --device cpu")
        size, tokens, lengths, rounds = (_GPU if device == "cuda" else _CPU)[self.profile]
        return ThroughputConfig(
            profile=self.profile,
            size=self.size or size,
            arms=self.arms,
            rounds=self.rounds or rounds,
            device=device,
            precision=self.precision or ("bfloat16" if device == "cuda" else "float32"),
            backend=self.backend,
            settings=settings_of(self.tokens or tokens, self.lengths or lengths),
        )
