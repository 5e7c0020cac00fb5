"""Settings of the MAD benchmark: arms, profiles, and what each profile runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from efla.errors import unknown_name
from efla.experiments.experiment import Group
from efla.experiments.mad.tasks import SEED, TASKS, Setting, baseline, changed, sweep
from efla.runs.records import GRID


class Arm(NamedTuple):
    """A token mixer: linear attention by a rule, with keys normalised or not; or one of the two others."""

    mixer: str
    rule: str = ""
    key_norm: bool = False


ARMS = {
    "delta-l2": Arm("linear", "delta", True),
    "exact-flow": Arm("linear", "efla"),
    "delta-raw": Arm("linear", "delta"),
    "exact-flow-l2": Arm("linear", "efla", True),
    "gated-delta": Arm("linear", "gated_delta", True),
    "gated-exact-flow": Arm("linear", "gated_efla"),
    "attention": Arm("attention"),
    "mamba2": Arm("mamba2"),
    "rk2": Arm("linear", "rk2"),
    "rk4": Arm("linear", "rk4"),
    "implicit-euler": Arm("linear", "implicit_euler"),
    "crank-nicolson": Arm("linear", "crank_nicolson"),
}
PAIR = ("delta-l2", "exact-flow")
MAIN_ARMS = (*PAIR, "delta-raw")
REFERENCE_ARMS = tuple(ARMS)[:7]

# The cheap tasks, which the paper singles out, come first.
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
    """One table of protocol runs: train on a setting with one rate and weight decay, evaluate on its own test set."""

    profile: str
    width: int = 128
    heads: int = 4
    batch: int
    memorization_batch: int
    steps: int | None = None
    """Budget in optimiser steps; with ``epochs`` the budget is passes over the training set instead."""
    memorization_steps: int | None = None
    epochs: int | None = None
    evaluate_every: int | None = None
    """Optimiser steps between evaluations; after every epoch if absent. The last step is always evaluated."""
    stop_above: float = 0.999
    """Training ends when the reference accuracy on the test set exceeds this."""
    schedule: str = "constant"
    """constant, as the reference really trains, or cosine (to 1e-6 over the budget), as it meant to."""
    precision: str = "float32"
    """float32, or bfloat16 (autocast; weights stay float32)."""
    device: str = "cpu"
    backend: str = "auto"
    data: str = "generated"
    """generated, or files (the published data sets)."""
    bit_exact: bool = False
    guarantee_probe: bool = False
    groups: tuple[Group, ...] = field(metadata=GRID)
    folder: str | None = field(default=None, metadata=GRID)
    """Where the published data sets are on this machine."""
    gpu_share: float = field(default=1.0, metadata=GRID)
    """Part of a GPU that a cell asks of a Ray cluster."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(Group(*group) for group in self.groups))
        known = settings_of(self.profile)
        for group in self.groups:
            for name in group.settings:
                if name not in known:
                    raise unknown_name(f"setting of profile {self.profile}", name, known)
            group.check(ARMS)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give the budget as steps or as epochs, got steps={self.steps} and epochs={self.epochs}")
        numbers = {
            "batch": self.batch, "memorization_batch": self.memorization_batch, "steps": self.steps, "epochs": self.epochs,
            "memorization_steps": self.memorization_steps, "evaluate_every": self.evaluate_every,
        }  # fmt: skip
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if not 0 < self.gpu_share <= 1:
            raise ValueError(f"gpu_share must lie above 0 and be at most 1, got {self.gpu_share}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if self.width % 16:
            raise ValueError(
                f"width must be a multiple of 16 (attention heads of width 8, rotary pairs), got {self.width}"
            )
        if self.data == "files" and (self.bit_exact or self.guarantee_probe):
            raise ValueError(
                "bit_exact and guarantee_probe say how data are generated; they cannot be had with files (--data)"
            )
        for name, value, choices in (
            ("schedule", self.schedule, ("constant", "cosine")), ("precision", self.precision, ("float32", "bfloat16")),
            ("data", self.data, ("generated", "files")),
        ):  # fmt: skip
            if value not in choices:
                raise unknown_name(name, value, choices)

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
    data = "generated" if folder is None else "files"
    if name == "quick":
        return MadConfig(
            profile=name, width=64, heads=2, batch=32, memorization_batch=16, steps=600, memorization_steps=400,
            evaluate_every=200, data=data, folder=folder, device=device,
            groups=(Group(PAIR, (1e-3,), (SEED,), settings=settings),),
        )  # fmt: skip
    if name == "full":
        baselines, hard = settings[:6], settings[6:]
        rates = (5e-4, 1e-3)
        more_seeds = (SEED + 1, SEED + 2) if folder is None else ()  # the published files have one
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
