"""The command line of the exactness study."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from efla.experiments.exactness.config import ExactnessConfig, profile
from efla.experiments.experiment import Options


@dataclass(frozen=True, kw_only=True)
class Exactness(Options):
    """Every rule against the true flow: error, stability, the memory under energetic keys. Seconds."""

    profile: Literal["quick", "full"] = "quick"
    rules: tuple[str, ...] | None = None
    """Rules to study instead of all nine."""

    def config(self) -> ExactnessConfig:
        """The resolved config."""
        config = profile(self.profile)
        return config if self.rules is None else replace(config, rules=self.rules)
