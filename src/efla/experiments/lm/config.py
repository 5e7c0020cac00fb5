"""Settings and command-line options of the language-model comparison: arms, profiles, budgets, measurements."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from efla.data import corpora
from efla.data.files import data_folder
from efla.errors import check_names
from efla.evaluation.table import ACCURACIES
from efla.experiments.experiment import GridConfig, GridOptions, Group, restrict_grid
from efla.models import presets
from efla.models.loading import choose_device
from efla.runs.records import GRID, Count, Minimum

if TYPE_CHECKING:
    from typing_extensions import Self

PAIR = ("delta-l2", "exact-flow")
GATED_PAIR = ("gated-delta", "gated-exact-flow")
OTHERS = ("mamba2", "attention")
CONTROLS = ("delta-raw", "exact-flow-l2")
ARM_ORDER = (*PAIR, *GATED_PAIR, *OTHERS, *CONTROLS)
assert set(ARM_ORDER) == set(presets.arms())
RAW_KEYS = ("exact-flow", "gated-exact-flow", "delta-raw")
RECURRENT = tuple(arm for arm in ARM_ORDER if arm != "attention")
CHOICES = {column.task: column for column in ACCURACIES if column.task != "lambada_openai"}
"""The multiple-choice sets: task -> column of the paper's table."""

PEAK_RATE = 2e-3
SWEEP_RATES = (1e-3, 2e-3, 4e-3)
SEED = 42

Profile = Literal["quick", "full"]


@dataclass(frozen=True, kw_only=True)
class LmConfig(GridConfig):
    """One table: every arm is trained on the same rows of bytes, then measured on the same texts."""

    known_arms = ARM_ORDER
    profile: Profile
    """The size of the models."""
    corpus: str
    length: Annotated[int, Minimum(2)]
    rows: Count
    steps: Count
    validate_every: Count
    validation_bytes: Count
    """Bytes of the validation text that are scored during training."""
    final_validation_bytes: int | None = None
    """Bytes of the validation text that are scored at the end; default all."""
    test_bytes: int | None = None
    """Bytes of the test text that are scored; default all."""
    downstream: bool = True
    """Whether WikiText, LAMBADA and the multiple-choice sets are scored; their files must be in ``folder``."""
    wikitext_items: Count | None = None
    lambada_items: Count | None = None
    choice_items: Count = 20
    choice_seed: int = SEED
    """Multiple choice is scored for this seed only: it is expected at chance, and tests the scorer."""
    choice_length: int = 2048
    """Bytes of a question and a choice that the model sees; choices may be longer than a training row."""
    position_rows: Count = 64
    """Rows of 4 times the training length, for bits by position."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    max_nonfinite: Count = 20
    """A run ends after this many non-finite steps. A single one already marks it as failed."""
    device: str = "cpu"
    scratch: str | None = field(default=None, metadata=GRID)
    """The folder for checkpoints of unfinished cells; ``None``: no checkpoints."""
    save_seconds: float = field(default=120.0, metadata=GRID)
    """Training time between two checkpoints of a cell."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("corpus", [self.corpus], corpora.names())

    @property
    def bytes_per_step(self) -> int:
        return self.rows * self.length


def grid(profile: str, *, sweep: bool = False) -> tuple[Group, ...]:
    """The groups of a profile; with ``sweep``, the main pair at the other peak rates too."""
    one, rate = (SEED,), (PEAK_RATE,)
    groups = [Group((*PAIR, *GATED_PAIR, *OTHERS), rate, one)]
    if profile == "full":
        # The slow arms (Mamba-2, attention) do not come last, so that two workers finish at about the same time.
        groups += [Group(PAIR, rate, (SEED + 1, SEED + 2)), Group(CONTROLS, rate, one)]
        groups.append(Group(PAIR, rate, (SEED + 3, SEED + 4)))
        groups.append(Group((*GATED_PAIR, *OTHERS), rate, (SEED + 1, SEED + 2)))
    if sweep:
        groups.append(Group(PAIR, tuple(r for r in SWEEP_RATES if r != PEAK_RATE), one))
    return tuple(groups)


_PROFILES: dict[str, dict[str, Any]] = {
    "quick": {
        "corpus": "shakespeare", "length": 256, "rows": 8, "steps": 200, "validate_every": 50,
        "validation_bytes": 32_768, "lambada_items": 200, "choice_items": 20, "position_rows": 64,
    },
    "full": {
        "corpus": "novels", "length": 512, "rows": 8, "steps": 2_000, "validate_every": 250,
        "validation_bytes": 131_072, "final_validation_bytes": 1_048_576, "choice_items": 200, "position_rows": 256,
    },
}  # fmt: skip


def profile(name: Profile, *, sweep: bool = False, **changes: Any) -> LmConfig:
    """The config of a profile with some fields changed."""
    check_names("profile", [name], _PROFILES)
    return LmConfig(**({"profile": name, "groups": grid(name, sweep=sweep)} | _PROFILES[name] | changes))


@dataclass(frozen=True, kw_only=True)
class LmOptions(GridOptions):
    """Language models over bytes: six mixers at matched size on the same text in the same order."""

    profile: Profile = "quick"
    """quick: minutes, 470,000 parameters. full: hours, resumable, 1.9 million parameters, five seeds of the main pair
    and three of the others."""
    data: str | None = None
    """Folder with corpus/, lambada/, wikitext-2/ and eval/ (default: EFLA_DATA). Without one, quick trains on Python's own
    documentation and skips the test sets."""
    corpus: Literal["shakespeare", "novels", "enwik8", "python-docs"] | None = None
    """Text to train on instead of the profile's (quick: shakespeare, full: novels)."""
    arms: tuple[str, ...] | None = None
    """Arms to run: deltanet, efla, gated-deltanet, gated-efla, mamba2, transformer, deltanet-raw, efla-l2. Arms,
    rates and seeds select a part of the profile's runs; if it lacks one of their combinations, all are run instead."""
    lr_sweep: bool = False
    """Also run DeltaNet and EFLA at the peak rates 1e-3 and 4e-3."""
    device: str = "auto"
    """auto, cpu or cuda."""
    save_seconds: float = 120.0
    """Training time between two checkpoints of an unfinished cell."""

    @classmethod
    def for_all(cls, profile: Profile, data: str | None) -> Self:
        """Without a data folder every profile trains on Python's documentation."""
        return cls(profile=profile, data=data, corpus=None if data or os.environ.get("EFLA_DATA") else "python-docs")

    def config(self) -> LmConfig:
        root = data_folder(self.data)
        changes = self.given("corpus", "steps", "device", "backend", "save_seconds")
        if self.device == "auto":
            changes["device"] = choose_device("auto").type
        if root is None and self.corpus is None:
            if self.profile != "quick":
                raise FileNotFoundError(
                    "the full profile trains on the novels; set --data DIR or EFLA_DATA to the folder that holds "
                    "corpus/english_novels_98.tar.xz, or use --corpus python-docs, which needs no file"
                )
            changes["corpus"] = "python-docs"
        folder = None if root is None else str(root)
        config = profile(self.profile, sweep=self.lr_sweep, folder=folder, downstream=root is not None, **changes)
        asked = self.given("arms", "rates", "seeds")
        return replace(config, groups=restrict_grid(config.groups, asked, config.groups[0]))
