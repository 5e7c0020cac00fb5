"""The command line of the MAD benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from efla.errors import unknown_name
from efla.experiments.mad.config import Group, MadConfig, Profile, profile, settings_of


@dataclass(frozen=True, kw_only=True)
class Mad:
    """MAD: six synthetic tasks (recall, copying, compression, memorisation), one small model per update rule."""

    profile: Profile = "quick"
    """quick: minutes, one seed; full: hours, resumable; reference: all 66 settings with the reference's protocol, for GPUs
    or a Ray cluster (396 runs per arm)."""
    data: str | None = None
    """Folder with the published data sets, one folder per setting; default: generate the data."""
    tasks: tuple[str, ...] | None = None
    """Tasks to run instead of all six: in-context-recall, fuzzy-in-context-recall, noisy-in-context-recall,
    selective-copying, compression, memorization."""
    settings: tuple[str, ...] | None = None
    """Settings to run instead of all of the profile's: short (quick), baseline, or a changed one such as V64, L256,
    train800, noise0.6, copy32."""
    arms: tuple[str, ...] | None = None
    """Arms to run instead of the profile's: delta-l2, exact-flow, delta-raw, exact-flow-l2, gated-delta, gated-exact-flow,
    attention, mamba2, rk2, rk4, implicit-euler, crank-nicolson."""
    rates: tuple[float, ...] | None = None
    """Learning rates instead of the profile's."""
    decays: tuple[float, ...] | None = None
    """Weight decays instead of the profile's."""
    seeds: tuple[int, ...] | None = None
    """Seeds instead of the profile's; a seed sets data, weights and order."""
    heads: int | None = None
    """Heads instead of the profile's (8 of width 16 at d = 128: the state of the reference's own linear attention)."""
    steps: int | None = None
    """Optimiser steps instead of the profile's budget, for every task; rows say so."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate: constant, or cosine to 1e-6 over the budget."""
    precision: Literal["float32", "bfloat16"] | None = None
    """float32 (default on a CPU), or bfloat16 autocast with float32 weights (default on a GPU)."""
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
        config = profile(self.profile, folder=self.data, device=device)
        changes: dict[str, Any] = {
            "schedule": self.schedule, "backend": self.backend, "bit_exact": self.bit_exact,
            "guarantee_probe": self.guarantee_probe, "gpu_share": self.gpu_share,
        }  # fmt: skip
        if self.precision is not None:
            changes["precision"] = self.precision
        if self.heads is not None:
            changes["heads"] = self.heads
        if self.steps is not None:
            changes |= {"steps": self.steps, "memorization_steps": None, "epochs": None}
        return replace(config, groups=self._groups(config), **changes)

    def _groups(self, config: MadConfig) -> tuple[Group, ...]:
        """The profile's groups narrowed to the tasks and settings asked for; with arms, rates, decays or seeds given, one
        product of them over those settings."""
        known = settings_of(self.profile)
        for kind, asked, there in (
            ("task", self.tasks, sorted({setting.task for setting in known.values()})),
            ("setting", self.settings, sorted({setting.name for setting in known.values()})),
        ):
            for name in asked or ():
                if name not in there:
                    raise unknown_name(kind, name, there)

        def wanted(name: str) -> bool:
            setting = known[name]
            return (self.tasks is None or setting.task in self.tasks) and (
                self.settings is None or setting.name in self.settings
            )

        choices = (self.arms, self.rates, self.decays, self.seeds)
        first = config.groups[0]
        if any(choice is not None for choice in choices):
            names = tuple(name for group in config.groups for name in group.settings)
            groups: tuple[Group, ...] = (
                Group(
                    tuple(dict.fromkeys(names)), self.arms or first.arms, self.rates or first.rates,
                    self.decays if self.decays is not None else first.decays, self.seeds or first.seeds,
                ),
            )  # fmt: skip
        else:
            groups = config.groups
        narrowed = (group._replace(settings=tuple(filter(wanted, group.settings))) for group in groups)
        return tuple(group for group in narrowed if group.settings)
