"""Settings of the language-model comparison: arms, profiles, budgets and what is measured (spec lm.md section 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from efla.data import corpora
from efla.errors import unknown_name
from efla.experiments.experiment import Group
from efla.models import presets
from efla.runs.records import GRID

PAIR = ("delta-l2", "exact-flow")
GATED_PAIR = ("gated-delta", "gated-exact-flow")
OTHERS = ("mamba2", "attention")
CONTROLS = ("delta-raw", "exact-flow-l2")
ARM_ORDER = (*PAIR, *GATED_PAIR, *OTHERS, *CONTROLS)
assert set(ARM_ORDER) == set(presets.arms())
RAW_KEYS = ("exact-flow", "gated-exact-flow", "delta-raw")
RECURRENT = tuple(arm for arm in ARM_ORDER if arm != "attention")

PEAK_RATE = 2e-3
SWEEP_RATES = (1e-3, 2e-3, 4e-3)
SEED = 42

Profile = Literal["quick", "full"]
PROFILES: tuple[Profile, ...] = ("quick", "full")


@dataclass(frozen=True, kw_only=True)
class LmConfig:
    """One table: every arm trained on the same rows of bytes, then measured on the same texts."""

    profile: str
    """Which of the two sizes of the arms (spec 7.2)."""
    corpus: str
    length: int
    rows: int
    steps: int
    validate_every: int
    validation_bytes: int
    """Of the validation text, during training."""
    final_validation_bytes: int | None = None
    """Of the validation text, at the end; default all of it."""
    test_bytes: int | None = None
    """Of the test text; default all of it."""
    downstream: bool = True
    """Whether the files of WikiText, LAMBADA and the multiple-choice sets are there to be scored."""
    wikitext_items: int | None = None
    lambada_items: int | None = None
    choice_items: int = 20
    choice_seed: int = SEED
    """Multiple choice is scored for this seed only: it is expected at chance, and tests the scorer."""
    choice_length: int = 2048
    """Bytes the model sees of a question and a choice; choices may be longer than a training row."""
    position_rows: int = 64
    """Rows of 4 times the training length, for bits by position."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    max_nonfinite: int = 20
    """A run with so many steps that were not finite ends there; one such step already counts it as failed."""
    device: str = "cpu"
    backend: str = "auto"
    groups: tuple[Group, ...] = field(metadata=GRID)
    folder: str | None = field(default=None, metadata=GRID)
    """Where the texts are on this machine."""
    scratch: str | None = field(default=None, metadata=GRID)
    """Where unfinished cells keep their checkpoints; ``None``: nowhere."""
    save_seconds: float = field(default=120.0, metadata=GRID)
    """Training time between two checkpoints of a cell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(Group(*group) for group in self.groups))
        if self.profile not in PROFILES:
            raise unknown_name("profile", self.profile, PROFILES)
        if self.corpus not in corpora.names():
            raise unknown_name("corpus", self.corpus, corpora.names())
        for group in self.groups:
            group.check(ARM_ORDER)
        numbers = {
            "rows": self.rows, "steps": self.steps, "validate_every": self.validate_every,
            "validation_bytes": self.validation_bytes, "choice_items": self.choice_items,
            "position_rows": self.position_rows, "wikitext_items": self.wikitext_items,
            "lambada_items": self.lambada_items, "max_nonfinite": self.max_nonfinite,
        }  # fmt: skip
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if self.length < 2:
            raise ValueError(f"a row needs at least 2 bytes, got length {self.length}")

    @property
    def bytes_per_step(self) -> int:
        return self.rows * self.length


def grid(profile: str, *, sweep: bool = False) -> tuple[Group, ...]:
    """The groups of a profile; with ``sweep``, the pair at the other rates too."""
    one, rate = (SEED,), (PEAK_RATE,)
    if profile == "quick":
        groups = [Group((*PAIR, *GATED_PAIR, *OTHERS), rate, one)]
    else:
        # Long runs (Mamba-2, attention) not last, so that two workers end at about the same time.
        groups = [
            Group((*PAIR, *GATED_PAIR, *OTHERS), rate, one),
            Group(PAIR, rate, (SEED + 1, SEED + 2)),
            Group(CONTROLS, rate, one),
        ]
    if sweep:
        groups.append(Group(PAIR, tuple(r for r in SWEEP_RATES if r != PEAK_RATE), one))
    return tuple(groups)


def profile(
    name: str,
    *,
    corpus: str | None = None,
    folder: str | None = None,
    downstream: bool = True,
    sweep: bool = False,
) -> LmConfig:
    """The config of a profile (spec 7.3)."""
    if name == "quick":
        return LmConfig(
            profile=name, corpus=corpus or "shakespeare", length=256, rows=8, steps=200, validate_every=50,
            validation_bytes=32_768, lambada_items=200, choice_items=20, position_rows=64,
            downstream=downstream, folder=folder, groups=grid(name, sweep=sweep),
        )  # fmt: skip
    if name == "full":
        return LmConfig(
            profile=name, corpus=corpus or "novels", length=512, rows=8, steps=2_000, validate_every=250,
            validation_bytes=131_072, final_validation_bytes=1_048_576, choice_items=200, position_rows=256,
            downstream=downstream, folder=folder, groups=grid(name, sweep=sweep),
        )  # fmt: skip
    raise unknown_name("profile", name, PROFILES)
