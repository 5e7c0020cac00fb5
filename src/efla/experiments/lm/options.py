"""The command line of the language-model comparison."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

from efla.evaluation.tasks import data_folder
from efla.experiments.experiment import Group, Options, restrict_grid
from efla.experiments.lm.config import LmConfig, Profile, profile


@dataclass(frozen=True, kw_only=True)
class Lm(Options):
    """Language models over bytes: six mixers at matched size on the same text in the same order."""

    profile: Profile = "quick"
    """quick: minutes, 470,000 parameters; full: hours, resumable, 1.9 million parameters, three seeds of the main pair."""
    data: str | None = None
    """Folder with corpus/, lambada/, wikitext-2/ and eval/; default: EFLA_DATA. Without one, quick trains on Python's own
    documentation and skips the test sets."""
    corpus: Literal["shakespeare", "novels", "enwik8", "python-docs"] | None = None
    """Text to train on instead of the profile's (quick: shakespeare, full: novels)."""
    arms: tuple[str, ...] | None = None
    """Arms to run: delta-l2, exact-flow, gated-delta, gated-exact-flow, mamba2, attention,
    delta-raw, exact-flow-l2."""
    rates: tuple[float, ...] | None = None
    """Peak learning rates to run."""
    seeds: tuple[int, ...] | None = None
    """Seeds to run; a seed sets weights and the order of rows. Arms, rates and seeds choose a part of the profile's runs; if
    it lacks one of their combinations, all of them are run instead."""
    lr_sweep: bool = False
    """Also run delta-l2 and exact-flow at the peak rates 1e-3 and 4e-3."""
    steps: int | None = None
    """Optimizer steps instead of the profile's; rows say so."""
    device: str = "cpu"
    """cpu or cuda."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""
    save_seconds: float = 120.0
    """Training time between two checkpoints of an unfinished cell."""

    @classmethod
    def for_all(cls, profile: Profile, data: str | None) -> Lm:
        has_data = bool(data or os.environ.get("EFLA_DATA"))
        return cls(profile=profile, data=data, corpus=None if has_data else "python-docs")

    def config(self) -> LmConfig:
        """The resolved config."""
        root = data_folder(self.data)
        corpus: str | None = self.corpus
        if root is None and corpus is None:
            if self.profile != "quick":
                raise FileNotFoundError(
                    "the full profile trains on the novels; name the folder that holds corpus/english_novels_98.tar.xz "
                    "with --data DIR or EFLA_DATA, or choose --corpus python-docs, which needs no file"
                )
            corpus = "python-docs"
        config = profile(
            self.profile,
            corpus=corpus,
            folder=None if root is None else str(root),
            downstream=root is not None,
            sweep=self.lr_sweep,
        )
        changes: dict[str, Any] = {"device": self.device, "backend": self.backend, "save_seconds": self.save_seconds}
        if self.steps is not None:
            changes["steps"] = self.steps
        return replace(config, groups=self._groups(config), **changes)

    def _groups(self, config: LmConfig) -> tuple[Group, ...]:
        """The part of the profile's grid that was asked for."""
        return restrict_grid(config.groups, self.given("arms", "rates", "seeds"), config.groups[0])
