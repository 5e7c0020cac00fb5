"""The six tasks of MAD and their settings: the baselines, and the difficulty sweep that changes one parameter at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from efla.errors import unknown_name

IGNORE = -100
"""A target with this value counts neither in the loss nor in the metric."""

TASKS = {
    "in-context-recall": "CR",
    "fuzzy-in-context-recall": "FR",
    "noisy-in-context-recall": "NR",
    "selective-copying": "SC",
    "compression": "C",
    "memorization": "M",
}
"""Task -> shorthand."""

RECALL = ("in-context-recall", "noisy-in-context-recall")
FUZZY = "fuzzy-in-context-recall"
_OPTIONS: dict[str, tuple[str, ...]] = {
    "noise_vocab_size": RECALL,
    "frac_noise": RECALL,
    "k_motif_size": (FUZZY,),
    "v_motif_size": (FUZZY,),
    "num_tokens_to_copy": ("selective-copying",),
}
"""Parameter -> the tasks that have it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One complete choice of task parameters. ``name`` tells it from the task's other settings."""

    task: str
    name: str = "baseline"
    vocab_size: int
    seq_len: int
    noise_vocab_size: int = 0
    frac_noise: float = 0.0
    k_motif_size: int = 1
    v_motif_size: int = 1
    num_tokens_to_copy: int = 0
    num_train_examples: int = 12_800
    num_test_examples: int = 1_280

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown_name("MAD task", self.task, TASKS)
        if self.num_train_examples < 1 or self.num_test_examples < 1:
            raise ValueError(
                "num_train_examples and num_test_examples must be at least 1, got "
                f"{self.num_train_examples} and {self.num_test_examples}"
            )
        problem = self._problem()
        if problem is not None:
            raise ValueError(f"{self.task}: {problem}")

    def _problem(self) -> str | None:
        for name, tasks in _OPTIONS.items():
            default = getattr(Setting, name)
            if self.task not in tasks and getattr(self, name) != default:
                return (
                    f"{name} is a parameter of {' and '.join(tasks)} and has no effect here, "
                    f"got {getattr(self, name)}; leave it at {default}"
                )
        if self.task in RECALL:
            if self.seq_len % 2 or self.seq_len < 4:
                return f"seq_len must be even and at least 4 (key-value pairs), got {self.seq_len}"
            if self.vocab_size - self.noise_vocab_size < 2:
                return f"vocab_size counts the {self.noise_vocab_size} noise tokens and needs two more, got {self.vocab_size}"
            if not 0 <= self.frac_noise < 1:
                return f"frac_noise must lie in [0, 1), got {self.frac_noise}"
            if self.frac_noise > 0 and self.noise_vocab_size < 1:
                return f"frac_noise = {self.frac_noise} needs noise tokens, got noise_vocab_size = 0"
        elif self.task == FUZZY:
            keys, values = len(self.keys), len(self.values)
            if keys < self.k_motif_size or values < self.v_motif_size:
                return (
                    f"motifs of {self.k_motif_size} key and {self.v_motif_size} value tokens without repeats need as many "
                    f"tokens, but vocab_size = {self.vocab_size} gives {keys} and {values}"
                )
            shortest = 2 * (self.k_motif_size + self.v_motif_size) + 1
            if self.seq_len < shortest:
                return f"seq_len must be at least {shortest} to show the probe twice, got {self.seq_len}"
        elif self.task == "selective-copying":
            if self.num_tokens_to_copy < 1:
                return f"num_tokens_to_copy must be at least 1, got {self.num_tokens_to_copy}"
            if self.seq_len <= 2 * self.num_tokens_to_copy + 1:
                return f"seq_len must exceed 2 * {self.num_tokens_to_copy} + 1 tokens, got {self.seq_len}"
            if self.vocab_size < 3:
                return f"vocab_size must be at least 3 (content, blank, marker), got {self.vocab_size}"
        elif self.task == "compression":
            if self.seq_len < 2 or self.vocab_size < 2:
                return f"seq_len and vocab_size must be at least 2, got {self.seq_len} and {self.vocab_size}"
        elif self.seq_len % 2 or self.seq_len < 2 or self.vocab_size < 3:
            return (
                f"seq_len must be even and vocab_size at least 3 (key, value, marker), "
                f"got {self.seq_len} and {self.vocab_size}"
            )
        return None

    @property
    def id(self) -> str:
        """``task/name``."""
        return f"{self.task}/{self.name}"

    @property
    def length(self) -> int:
        """Length of inputs and targets: one less than ``seq_len`` in plain and noisy recall, where they are shifted."""
        return self.seq_len - 1 if self.task in RECALL else self.seq_len

    @property
    def pair_vocab_size(self) -> int:
        """Tokens shared by keys and values, n: without noise tokens, pad and insert marker."""
        special = 1 if self.task in (FUZZY, "memorization") else 0
        return self.vocab_size - self.noise_vocab_size - special

    @property
    def keys(self) -> range:
        """Key tokens: 0 .. floor(n/2) - 1."""
        return range(self.pair_vocab_size // 2)

    @property
    def values(self) -> range:
        """Value tokens: floor(n/2) .. n - 1."""
        return range(self.pair_vocab_size // 2, self.pair_vocab_size)

    @property
    def marker(self) -> int:
        """The task's last token: pad (fuzzy recall), copy, compression or insert marker."""
        return self.vocab_size - 1

    @property
    def blank(self) -> int:
        """The blank of selective copying."""
        return self.vocab_size - 2

    def record(self) -> dict[str, Any]:
        """All parameters, for a result row."""
        return asdict(self)


_BASELINES = {
    "in-context-recall": Setting(task="in-context-recall", vocab_size=16, seq_len=128),
    "fuzzy-in-context-recall": Setting(
        task="fuzzy-in-context-recall", vocab_size=16, seq_len=128, k_motif_size=3, v_motif_size=3
    ),
    "noisy-in-context-recall": Setting(
        task="noisy-in-context-recall", vocab_size=32, seq_len=128, noise_vocab_size=16, frac_noise=0.2
    ),
    "selective-copying": Setting(task="selective-copying", vocab_size=16, seq_len=256, num_tokens_to_copy=16),
    "compression": Setting(task="compression", vocab_size=16, seq_len=32),
    "memorization": Setting(task="memorization", vocab_size=256, seq_len=32, num_train_examples=256),
}

_LONGER = (256, 512, 1024)
_FEWER = (6400, 3200, 1600, 800)
_SWEEPS: dict[str, dict[str, tuple[float, ...]]] = {
    "in-context-recall": {"vocab_size": (32, 64, 128), "seq_len": _LONGER, "num_train_examples": _FEWER},
    "fuzzy-in-context-recall": {"vocab_size": (32, 64, 128), "seq_len": _LONGER, "num_train_examples": _FEWER},
    "noisy-in-context-recall": {
        "vocab_size": (48, 80, 144),
        "seq_len": _LONGER,
        "num_train_examples": _FEWER,
        "frac_noise": (0.4, 0.6, 0.8),
    },
    "selective-copying": {
        "vocab_size": (32, 64, 128),
        "seq_len": (512, 1024),
        "num_train_examples": _FEWER,
        "num_tokens_to_copy": (32, 64, 96),
    },
    "compression": {"vocab_size": (32, 64, 128), "seq_len": (64, 128, 256), "num_train_examples": _FEWER},
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
}
_PREFIX = {"vocab_size": "V", "seq_len": "L", "num_train_examples": "train", "frac_noise": "noise",
           "num_tokens_to_copy": "copy"}  # fmt: skip


def baseline(task: str) -> Setting:
    """A task's baseline setting."""
    if task not in TASKS:
        raise unknown_name("MAD task", task, TASKS)
    return _BASELINES[task]


def changed(task: str, parameter: str, value: float) -> Setting:
    """A task's baseline with one parameter changed, named after it: ``V64``, ``L256``, ``train800``, ``noise0.6``."""
    if parameter not in _PREFIX:
        raise unknown_name("parameter of the sweep", parameter, _PREFIX)
    changes: dict[str, Any] = {parameter: value, "name": f"{_PREFIX[parameter]}{value:g}"}
    return replace(baseline(task), **changes)


def sweep(task: str) -> list[Setting]:
    """All settings of a task, the baseline first: one factor at a time, 66 over the six tasks."""
    found = [baseline(task)]
    for parameter, values in _SWEEPS[task].items():
        found += [changed(task, parameter, value) for value in values]
    return found
