"""Configs of the MAD benchmark: arms, profiles and command-line options."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from efla.errors import unknown_name
from efla.experiments.experiment import Group, Options, restrict_grid
from efla.experiments.mad.tasks import SEED, TASKS, Setting, baseline, changed, sweep
from efla.runs.records import GRID, Count, check_fields


class MixerArm(NamedTuple):
    """A token mixer: linear attention with a rule and normalised or raw keys, softmax attention, or Mamba-2."""

    mixer: str
    rule: str = ""
    key_norm: bool = False


ARMS = {
    "delta-l2": MixerArm("linear", "delta", True),
    "exact-flow": MixerArm("linear", "efla"),
    "delta-raw": MixerArm("linear", "delta"),
    "exact-flow-l2": MixerArm("linear", "efla", True),
    "gated-delta": MixerArm("linear", "gated_delta", True),
    "gated-exact-flow": MixerArm("linear", "gated_efla"),
    "attention": MixerArm("attention"),
    "mamba2": MixerArm("mamba2"),
    "rk2": MixerArm("linear", "rk2"),
    "rk4": MixerArm("linear", "rk4"),
    "implicit-euler": MixerArm("linear", "implicit_euler"),
    "crank-nicolson": MixerArm("linear", "crank_nicolson"),
}
PAIR = ("delta-l2", "exact-flow")
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
class MadConfig:
    """One table of runs: train on a setting with one rate and weight decay, evaluate on its test set."""

    profile: str
    width: int = 128
    heads: int = 4
    batch: Count
    memorization_batch: Count
    steps: Count | None = None
    """Budget in optimiser steps; alternatively ``epochs``, passes over the training set."""
    memorization_steps: Count | None = None
    epochs: Count | None = None
    evaluate_every: Count | None = None
    """Optimiser steps between evaluations; default: an epoch. The last step is always evaluated."""
    stop_above: float = 0.999
    """Training ends when the reference accuracy on the test set exceeds this."""
    schedule: Literal["constant", "cosine"] = "constant"
    """constant, as the reference trains, or cosine (to 1e-6 over the budget), as the reference configures."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 (autocast; weights stay float32)."""
    device: str = "cpu"
    backend: str = "auto"
    data: Literal["generated", "files"] = "generated"
    """generated, or files (the published data sets)."""
    bit_exact: bool = False
    guarantee_probe: bool = False
    groups: tuple[Group, ...] = field(metadata=GRID)
    """The settings of a group are ``task/name``."""
    folder: str | None = field(default=None, metadata=GRID)
    """Where the published data sets are on this machine."""
    gpu_share: float = field(default=1.0, metadata=GRID)
    """Share of a GPU that a cell requests from a Ray cluster."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(Group(*group) for group in self.groups))
        check_fields(self)
        known = settings_of(self.profile)
        for group in self.groups:
            for name in group.settings:
                if name not in known:
                    raise unknown_name(f"setting of profile {self.profile}", name, known)
            group.check(ARMS)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give the budget as steps or as epochs, got steps={self.steps} and epochs={self.epochs}")
        if not 0 < self.gpu_share <= 1:
            raise ValueError(f"gpu_share must be above 0 and at most 1, got {self.gpu_share}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.width % 16:
            raise ValueError(
                f"width must be a multiple of 16 (attention heads of width 8, rotary pairs), got {self.width}"
            )
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
        """The budget of a run in optimiser steps."""
        per_epoch = -(-setting.num_train_examples // self.batch_of(setting.task))
        if self.epochs is not None:
            return self.epochs * per_epoch
        assert self.steps is not None
        return (self.memorization_steps or self.steps) if setting.task == "memorization" else self.steps


Profile = Literal["quick", "full", "reference"]
PROFILES = ("quick", "full", "reference")


def settings_of(profile: str) -> dict[str, Setting]:
    """All settings of a profile by ``task/name``, cheap tasks first."""
    if profile == "quick":
        found = [_short(task) for task in TASK_ORDER]
    elif profile == "full":
        found = [baseline(task) for task in TASK_ORDER] + [changed(task, *HARD[task]) for task in TASK_ORDER]
    elif profile == "reference":
        found = [setting for task in TASK_ORDER for setting in sweep(task)]
    else:
        raise unknown_name("profile", profile, PROFILES)
    return {setting.id: setting for setting in found}


def _short(task: str) -> Setting:
    """The baseline of a task, shortened: same layout, masking and metric."""
    setting = replace(baseline(task), name="short", num_train_examples=3_200, num_test_examples=320)
    if task == "memorization":
        return replace(setting, vocab_size=64, num_train_examples=64)
    if task == "compression":
        return replace(setting, seq_len=16)
    if task == "selective-copying":
        return replace(setting, seq_len=64, num_tokens_to_copy=8)
    return replace(setting, seq_len=64)


def profile(name: str, *, folder: str | None = None, device: str = "cpu") -> MadConfig:
    """The config of a profile."""
    settings = tuple(settings_of(name))
    data: Literal["generated", "files"] = "generated" if folder is None else "files"
    if name == "quick":
        return MadConfig(
            profile=name, width=64, heads=2, batch=32, memorization_batch=16, steps=600, memorization_steps=400,
            evaluate_every=200, data=data, folder=folder, device=device,
            groups=(Group(PAIR, (1e-3,), (SEED,), settings=settings),),
        )  # fmt: skip
    if name == "full":
        baselines, hard = settings[:6], settings[6:]
        rates = (5e-4, 1e-3)
        more_seeds = (SEED + 1, SEED + 2) if folder is None else ()  # the published files have one seed
        return MadConfig(
            profile=name, batch=32, memorization_batch=32, steps=3_000, memorization_steps=1_600, evaluate_every=500,
            data=data, folder=folder, device=device,
            groups=(
                Group(MAIN_ARMS, rates, (SEED,), settings=baselines),
                Group(PAIR, rates, more_seeds, settings=baselines),
                Group(MAIN_ARMS, rates, (SEED,), settings=hard),
            ),
        )  # fmt: skip
    return MadConfig(
        profile=name, batch=128, memorization_batch=128, epochs=200, data=data, folder=folder, device=device,
        precision="bfloat16" if device.startswith("cuda") else "float32",
        groups=(Group(REFERENCE_ARMS, (1e-4, 5e-4, 1e-3), (SEED,), (0.0, 0.1), settings),),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MadOptions(Options):
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
    runs; if the profile lacks one of their combinations, all combinations are run on every setting."""
    heads: int | None = None
    """Heads instead of the profile's (at d = 128, 8 of width 16 have 2,048 numbers of state, as the reference's gated linear
    attention)."""
    steps: int | None = None
    """Optimiser steps instead of the profile's budget, for every task; recorded in the rows."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate: constant, or cosine to 1e-6 over the budget."""
    precision: Literal["float32", "bfloat16"] | None = None
    """float32, or bfloat16 autocast with float32 weights (default of the reference profile on a GPU)."""
    device: str | None = None
    """cpu or cuda; default: a GPU for the reference profile if there is one, else the CPU."""
    gpu_share: float = 1.0
    """Share of a GPU that a run requests from a Ray cluster (--executor ray): 0.25 puts four on one."""
    backend: str = "auto"
    """Backend of the scan, see `efla doctor`."""
    bit_exact: bool = False
    """Generate recall tasks in the reference's order of draws (slow: it enumerates all motifs)."""
    guarantee_probe: bool = False
    """Fuzzy recall: always show the probe before asking for it (the reference does not in 2% of the instances)."""

    def config(self) -> MadConfig:
        device = self.device or ("cuda" if self.profile == "reference" and torch.cuda.is_available() else "cpu")
        if self.data is not None and self.profile == "quick":
            raise ValueError(
                "the published data sets have none of quick's short settings; leave --data out, or choose --profile full "
                "or reference"
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
        """The requested part of the profile's grid."""
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
