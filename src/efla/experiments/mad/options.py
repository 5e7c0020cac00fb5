"""The command line of the MAD benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from efla.errors import unknown_name
from efla.experiments.experiment import Group, Options, restrict_grid
from efla.experiments.mad.config import MadConfig, Profile, profile, settings_of


@dataclass(frozen=True, kw_only=True)
class Mad(Options):
    """MAD: six synthetic tasks (recall, copying, compression, memorisation), one small model per update rule."""

    profile: Profile = "quick"
    """quick: minutes, one seed; full: hours, resumable; reference: all 66 settings with the reference's protocol, for GPUs
    or a Ray cluster (396 runs per arm)."""
    data: str | None = None
    """Folder with the published data sets, one folder per setting (seed 12345, not the short ones of quick); default:
    generate the data."""
    tasks: tuple[str, ...] | None = None
    """Tasks to run instead of all six: in-context-recall, fuzzy-in-context-recall, noisy-in-context-recall,
    selective-copying, compression, memorization."""
    settings: tuple[str, ...] | None = None
    """Settings to run instead of all of the profile's: short (quick), baseline, or a changed one such as V64, L256,
    train800, noise0.6, copy32."""
    arms: tuple[str, ...] | None = None
    """Arms to run: delta-l2, exact-flow, delta-raw, exact-flow-l2, gated-delta, gated-exact-flow, attention, mamba2, rk2,
    rk4, implicit-euler, crank-nicolson."""
    rates: tuple[float, ...] | None = None
    """Learning rates to run."""
    decays: tuple[float, ...] | None = None
    """Weight decays to run."""
    seeds: tuple[int, ...] | None = None
    """Seeds to run; a seed sets data, weights and order. Arms, rates, decays and seeds choose a part of the profile's
    runs; if it lacks one of their combinations, all of them are run instead, on every setting."""
    heads: int | None = None
    """Heads instead of the profile's (at d = 128, 8 of width 16 have 2,048 numbers of state, as the reference's gated linear
    attention)."""
    steps: int | None = None
    """Optimiser steps instead of the profile's budget, for every task; rows say so."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate: constant, or cosine to 1e-6 over the budget."""
    precision: Literal["float32", "bfloat16"] | None = None
    """float32, or bfloat16 autocast with float32 weights (default of the reference profile on a GPU)."""
    device: str | None = None
    """cpu or cuda; default: a GPU for the reference profile if there is one, else the CPU."""
    gpu_share: float = 1.0
    """Part of a GPU that a run asks of a Ray cluster (--executor ray): 0.25 puts four on one."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""
    bit_exact: bool = False
    """Generate recall tasks in the reference's own order of draws (slow: it enumerates all motifs)."""
    guarantee_probe: bool = False
    """Fuzzy recall: always show the probe before asking for it (the reference does not in 2% of the instances)."""

    def config(self) -> MadConfig:
        """The resolved config."""
        device = self.device or ("cuda" if self.profile == "reference" and torch.cuda.is_available() else "cpu")
        if self.data is not None and self.profile == "quick":
            raise ValueError(
                "the published data sets hold none of quick's short settings; leave --data out, or choose --profile full or "
                "reference"
            )
        config = profile(self.profile, folder=self.data, device=device)
        changes: dict[str, Any] = {
            "schedule": self.schedule, "backend": self.backend, "bit_exact": self.bit_exact,
            "guarantee_probe": self.guarantee_probe, "gpu_share": self.gpu_share,
        }  # fmt: skip
        changes |= self.given("precision", "heads")
        if self.steps is not None:
            changes |= {"steps": self.steps, "memorization_steps": None, "epochs": None}
        return replace(config, groups=self._groups(config), **changes)

    def _groups(self, config: MadConfig) -> tuple[Group, ...]:
        """The part of the profile's grid that was asked for."""
        known = settings_of(self.profile)
        for kind, chosen, there in (
            ("task", self.tasks, sorted({setting.task for setting in known.values()})),
            ("setting", self.settings, sorted({setting.name for setting in known.values()})),
        ):
            for name in chosen or ():
                if name not in there:
                    raise unknown_name(kind, name, there)

        def wanted(name: str) -> bool:
            setting = known[name]
            return (self.tasks is None or setting.task in self.tasks) and (
                self.settings is None or setting.name in self.settings
            )

        asked = self.given("arms", "rates", "decays", "seeds")
        every = tuple(dict.fromkeys(name for group in config.groups for name in group.settings))
        groups = restrict_grid(config.groups, asked, config.groups[0]._replace(settings=every))
        narrowed = (group._replace(settings=tuple(filter(wanted, group.settings))) for group in groups)
        return tuple(group for group in narrowed if group.settings)
