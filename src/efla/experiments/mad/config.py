"""Configs of the MAD benchmark: arms, profiles and command-line options."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from efla.errors import check_names
from efla.experiments.arms import ARMS
from efla.experiments.experiment import GridConfig, GridOptions, Group, restrict_grid
from efla.experiments.mad.tasks import SEED, TASKS, Setting, baseline, changed, sweep
from efla.models.loading import choose_device
from efla.runs.records import GRID, Count

PAIR = ("delta-l2", "exact-flow")
GATED_PAIR = ("gated-delta", "gated-exact-flow")
MAIN_ARMS = (*PAIR, "delta-raw")
REFERENCE_ARMS = tuple(ARMS)[:7]

# The cheap tasks, which the paper emphasises, come first.
TASK_ORDER = ("memorization", "compression", "in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall",
              "selective-copying")  # fmt: skip
assert set(TASK_ORDER) == set(TASKS)

HARD = {
    "in-context-recall": ("vocab_size", 64),
    "noisy-in-context-recall": ("frac_noise", 0.6),
    "fuzzy-in-context-recall": ("seq_len", 256),
    "selective-copying": ("num_tokens_to_copy", 32),
    "compression": ("seq_len", 64),
    "memorization": ("vocab_size", 1024),
}


@dataclass(frozen=True, kw_only=True)
class MadConfig(GridConfig):
    """One table of runs: train on a setting with one rate and weight decay, evaluate on its test set.

    The settings of a group are ``task/name``.
    """

    known_arms = tuple(ARMS)
    profile: str
    width: int = 128
    heads: int = 4
    batch: Count
    memorization_batch: Count
    steps: Count | None = None
    """Budget in optimizer steps; alternatively ``epochs``, passes over the training set."""
    memorization_steps: Count | None = None
    epochs: Count | None = None
    evaluate_every: Count | None = None
    """Optimizer steps between evaluations; default: an epoch. The last step is always evaluated."""
    stop_above: float = 0.999
    """Training ends when the reference accuracy on the test set exceeds this."""
    schedule: Literal["constant", "cosine"] = "constant"
    """constant, as the reference trains, or cosine (to 1e-6 over the budget), as the reference configures."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 (autocast; weights stay float32)."""
    device: str = "cpu"
    data: Literal["generated", "files"] = "generated"
    """generated, or files (the published data sets)."""
    bit_exact: bool = False
    guarantee_probe: bool = False
    gpu_share: float = field(default=1.0, metadata=GRID)
    """Share of a GPU that a cell requests from a Ray cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for group in self.groups:
            check_names(f"setting of profile {self.profile}", group.settings, settings_of(self.profile))
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give the budget as steps or as epochs, got steps={self.steps} and epochs={self.epochs}")
        if not 0 < self.gpu_share <= 1:
            raise ValueError(f"gpu_share must be above 0 and at most 1, got {self.gpu_share}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.width % 16:
            raise ValueError(f"width must be a multiple of 16 (attention heads of width 8, rotary), got {self.width}")
        if self.data == "files" and (self.bit_exact or self.guarantee_probe):
            raise ValueError(
                "bit_exact and guarantee_probe are options of generated data; they cannot be combined with files (--data)"
            )

    def setting(self, task: str, name: str) -> Setting:
        """The setting of a cell."""
        return settings_of(self.profile)[f"{task}/{name}"]

    def batch_of(self, task: str) -> int:
        return self.memorization_batch if task == "memorization" else self.batch

    def steps_of(self, setting: Setting) -> int:
        """The budget of a run in optimizer steps."""
        per_epoch = -(-setting.num_train_examples // self.batch_of(setting.task))
        if self.epochs is not None:
            return self.epochs * per_epoch
        assert self.steps is not None
        return (self.memorization_steps or self.steps) if setting.task == "memorization" else self.steps


Profile = Literal["quick", "full", "reference"]


_SHORT: dict[str, dict[str, Any]] = {
    "memorization": {"vocab_size": 64, "num_train_examples": 64},
    "compression": {"seq_len": 16},
    "selective-copying": {"seq_len": 64, "num_tokens_to_copy": 8},
}
"""What the short setting of a task changes; the others shorten their sequences to 64."""


@cache
def settings_of(profile: str) -> dict[str, Setting]:
    """All settings of a profile by ``task/name``, cheap tasks first."""
    check_names("profile", [profile], _PROFILES)
    if profile == "quick":
        found = [_short(task) for task in TASK_ORDER]
    elif profile == "full":
        found = [baseline(task) for task in TASK_ORDER] + [changed(task, *HARD[task]) for task in TASK_ORDER]
    else:
        found = [setting for task in TASK_ORDER for setting in sweep(task)]
    return {setting.id: setting for setting in found}


def _short(task: str) -> Setting:
    """The baseline of a task, shortened: same layout, masking and metric."""
    changes = {"num_train_examples": 3_200, "num_test_examples": 320} | _SHORT.get(task, {"seq_len": 64})
    return replace(baseline(task), name="short", **changes)


_PROFILES: dict[str, dict[str, Any]] = {
    "quick": {
        "width": 64, "heads": 2, "batch": 32, "memorization_batch": 16, "steps": 600, "memorization_steps": 400,
        "evaluate_every": 200,
    },
    "full": {
        "batch": 32, "memorization_batch": 32, "steps": 3_000, "memorization_steps": 1_600, "evaluate_every": 500,
    },
    "reference": {"batch": 128, "memorization_batch": 128, "epochs": 200},
}  # fmt: skip


UNSOLVED = ("compression/baseline", "fuzzy-in-context-recall/baseline")
"""Baselines that neither arm of the main pair solves (99 %) within the budget of the full profile: more seeds can tell there."""


def grid(profile: str, *, one_seed: bool = False) -> tuple[Group, ...]:
    """The groups of a profile; in the full profile the pairs have further seeds, unless the data have only one."""
    settings, rates = tuple(settings_of(profile)), (5e-4, 1e-3)
    if profile == "quick":
        return (Group(PAIR, (1e-3,), (SEED,), settings=settings),)
    if profile == "reference":
        return (Group(REFERENCE_ARMS, (1e-4, *rates), (SEED,), (0.0, 0.1), settings),)
    baselines, hard = settings[:6], settings[6:]
    first, last = (Group(MAIN_ARMS, rates, (SEED,), settings=names) for names in (baselines, hard))
    if one_seed:
        return first, last
    return (
        first,
        Group(PAIR, rates, (SEED + 1, SEED + 2), settings=baselines),
        last,
        Group(PAIR, rates, tuple(range(SEED + 3, SEED + 8)), settings=UNSOLVED),
        Group(GATED_PAIR, rates, tuple(range(SEED, SEED + 8)), settings=UNSOLVED),
    )


def profile(name: str, *, folder: str | None = None, device: str = "cpu") -> MadConfig:
    """The config of a profile."""
    check_names("profile", [name], _PROFILES)
    in_bfloat16 = name == "reference" and device.startswith("cuda")
    return MadConfig(
        profile=name,
        **_PROFILES[name],
        data="generated" if folder is None else "files",
        folder=folder,
        device=device,
        precision="bfloat16" if in_bfloat16 else "float32",
        groups=grid(name, one_seed=folder is not None),  # the files have one
    )


@dataclass(frozen=True, kw_only=True)
class MadOptions(GridOptions):
    """MAD: six synthetic tasks (recall, copying, compression, memorisation), one small model per update rule."""

    profile: Profile = "quick"
    """quick: minutes, one seed; full: hours, resumable; reference: all 66 settings with the reference's protocol, for GPUs
    or a Ray cluster (396 runs per arm)."""
    data: str | None = None
    """Folder with the published data sets, one folder per setting (seed 12345, not the short ones of quick) (default:
    generate the data)."""
    tasks: tuple[str, ...] | None = None
    """Tasks to run instead of all six: in-context-recall, fuzzy-in-context-recall, noisy-in-context-recall,
    selective-copying, compression, memorization."""
    settings: tuple[str, ...] | None = None
    """Settings to run instead of all of the profile's: short (quick), baseline, or a changed one such as V64, L256,
    train800, noise0.6, copy32."""
    arms: tuple[str, ...] | None = None
    """Arms to run: deltanet, efla, deltanet-raw, efla-l2, gated-deltanet, gated-efla, transformer, mamba2, rk2,
    rk4, implicit-euler, crank-nicolson."""
    decays: tuple[float, ...] | None = None
    """Weight decays to run. Arms, rates, decays and seeds (of data, weights and order) select a part of the profile's runs;
    if it lacks one of their combinations, all are run on every setting instead."""
    heads: int | None = None
    """Heads instead of the profile's (at d = 128, 8 of width 16 have 2,048 numbers of state, as the reference's gated linear
    attention)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate: constant, or cosine to 1e-6 over the budget."""
    precision: Literal["float32", "bfloat16"] | None = None
    """float32, or bfloat16 autocast with float32 weights (default of the reference profile on a GPU)."""
    device: str = "auto"
    """auto (a GPU for the reference profile if there is one, else the CPU), cpu or cuda."""
    gpu_share: float = 1.0
    """Share of a GPU that a run requests from a Ray cluster (--executor ray): 0.25 puts four on one."""
    bit_exact: bool = False
    """Generate recall tasks in the reference's order of draws (slow: it enumerates all motifs)."""
    guarantee_probe: bool = False
    """Fuzzy recall: always show the probe before asking for it (the reference does not in 2% of the instances)."""

    def config(self) -> MadConfig:
        device = self.device
        if device == "auto":
            device = choose_device("auto").type if self.profile == "reference" else "cpu"
        if self.data is not None and self.profile == "quick":
            raise ValueError(
                "the published data sets have none of quick's short settings; leave --data out, or choose --profile full "
                "or reference"
            )
        config = profile(self.profile, folder=self.data, device=device)
        same = ("schedule", "backend", "bit_exact", "guarantee_probe", "gpu_share", "precision", "heads")
        changes = self.given(*same)
        if self.steps is not None:
            changes |= {"steps": self.steps, "memorization_steps": None, "epochs": None}
        return replace(config, groups=self._groups(config), **changes)

    def _groups(self, config: MadConfig) -> tuple[Group, ...]:
        """The requested part of the profile's grid."""
        known = settings_of(self.profile)
        check_names("task", self.tasks or (), sorted({setting.task for setting in known.values()}))
        check_names("setting", self.settings or (), sorted({setting.name for setting in known.values()}))
        wanted = {
            setting.id
            for setting in known.values()
            if (self.tasks is None or setting.task in self.tasks)
            and (self.settings is None or setting.name in self.settings)
        }
        asked = self.given("arms", "rates", "decays", "seeds")
        every = tuple(dict.fromkeys(name for group in config.groups for name in group.settings))
        groups = restrict_grid(config.groups, asked, config.groups[0]._replace(settings=every))
        narrowed = (group._replace(settings=tuple(filter(wanted.__contains__, group.settings))) for group in groups)
        return tuple(group for group in narrowed if group.settings)
