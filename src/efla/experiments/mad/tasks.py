"""The six synthetic tasks of MAD: recall (plain, noisy, fuzzy), selective copying, compression, memorization.

Settings are the baselines and a difficulty sweep that changes one parameter at a time. Data is generated or read from the
published data sets (Zenodo record 10843663): ``generate(baseline("in-context-recall"))``.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from efla.errors import check_names
from efla.experiments.mad import exact, fast
from efla.experiments.mad.exact import IGNORE
from efla.runs.records import Count, check_fields

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import TensorDataset

SEED = 12345
OVERLAP_WARNING = 1e-3
Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]

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
    """The parameters of a task. ``name`` distinguishes the settings of a task."""

    task: str
    name: str = "baseline"
    vocab_size: int
    seq_len: int
    noise_vocab_size: int = 0
    frac_noise: float = 0.0
    k_motif_size: int = 1
    v_motif_size: int = 1
    num_tokens_to_copy: int = 0
    num_train_examples: Count = 12_800
    num_test_examples: Count = 1_280

    def __post_init__(self) -> None:
        check_names("MAD task", [self.task], TASKS)
        check_fields(self)
        for is_possible, requirement in self._requirements():
            if not is_possible:
                raise ValueError(f"{self.task}: {requirement}")

    def _requirements(self) -> Iterator[tuple[bool, str]]:
        """(whether it is met, what is required)."""
        length, vocabulary = self.seq_len, self.vocab_size
        for name, tasks in _OPTIONS.items():
            given, default = getattr(self, name), getattr(Setting, name)
            yield (
                self.task in tasks or given == default,
                f"{name} is a parameter of {' and '.join(tasks)} and has no effect here, got {given}; leave it at {default}",
            )
        if self.task in RECALL:
            noise, share = self.noise_vocab_size, self.frac_noise
            yield (
                length % 2 == 0 and length >= 4,
                f"seq_len must be even and at least 4 (key-value pairs), got {length}",
            )
            yield (
                vocabulary - noise >= 2,
                f"vocab_size counts the {noise} noise tokens and needs two more, got {vocabulary}",
            )
            yield 0 <= share < 1, f"frac_noise must lie in [0, 1), got {share}"
            yield share == 0 or noise > 0, f"frac_noise = {share} needs noise tokens, got noise_vocab_size = 0"
        elif self.task == FUZZY:
            k, v = self.k_motif_size, self.v_motif_size
            yield (
                len(self.keys) >= k and len(self.values) >= v,
                f"motifs of {k} key and {v} value tokens without repeats need as many tokens, but vocab_size = {vocabulary} "
                f"gives {len(self.keys)} and {len(self.values)}",
            )
            shortest = 2 * (k + v) + 1
            yield length >= shortest, f"seq_len must be at least {shortest} to show the probe twice, got {length}"
        elif self.task == "selective-copying":
            count = self.num_tokens_to_copy
            yield count >= 1, f"num_tokens_to_copy must be at least 1, got {count}"
            yield length > 2 * count + 1, f"seq_len must exceed 2 * {count} + 1 tokens, got {length}"
            yield vocabulary >= 3, f"vocab_size must be at least 3 (content, blank, marker), got {vocabulary}"
        elif self.task == "compression":
            possible = length >= 2 and vocabulary >= 2
            yield possible, f"seq_len and vocab_size must be at least 2, got {length} and {vocabulary}"
        else:
            possible = length % 2 == 0 and length >= 2 and vocabulary >= 3
            requirement = "seq_len must be even and vocab_size at least 3 (key, value, marker)"
            yield possible, f"{requirement}, got {length} and {vocabulary}"

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


_BASELINES = {
    setting.task: setting
    for setting in (
        Setting(task="in-context-recall", vocab_size=16, seq_len=128),
        Setting(task=FUZZY, vocab_size=16, seq_len=128, k_motif_size=3, v_motif_size=3),
        Setting(task="noisy-in-context-recall", vocab_size=32, seq_len=128, noise_vocab_size=16, frac_noise=0.2),
        Setting(task="selective-copying", vocab_size=16, seq_len=256, num_tokens_to_copy=16),
        Setting(task="compression", vocab_size=16, seq_len=32),
        Setting(task="memorization", vocab_size=256, seq_len=32, num_train_examples=256),
    )
}

_HARDER: dict[str, tuple[float, ...]] = {
    "vocab_size": (32, 64, 128),
    "seq_len": (256, 512, 1024),
    "num_train_examples": (6400, 3200, 1600, 800),
}
_SWEEPS: dict[str, dict[str, tuple[float, ...]]] = {
    "in-context-recall": _HARDER,
    "fuzzy-in-context-recall": _HARDER,
    "noisy-in-context-recall": _HARDER | {"vocab_size": (48, 80, 144), "frac_noise": (0.4, 0.6, 0.8)},
    "selective-copying": _HARDER | {"seq_len": (512, 1024), "num_tokens_to_copy": (32, 64, 96)},
    "compression": _HARDER | {"seq_len": (64, 128, 256)},
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
}
_PREFIX = {"vocab_size": "V", "seq_len": "L", "num_train_examples": "train", "frac_noise": "noise",
           "num_tokens_to_copy": "copy"}  # fmt: skip


def baseline(task: str) -> Setting:
    """A task's baseline setting."""
    check_names("MAD task", [task], TASKS)
    return _BASELINES[task]


def changed(task: str, parameter: str, value: float) -> Setting:
    """A task's baseline with one parameter changed, named after the change: ``V64``, ``L256``, ``train800``, ``noise0.6``."""
    check_names("parameter of the sweep", [parameter], _PREFIX)
    changes: dict[str, Any] = {parameter: value, "name": f"{_PREFIX[parameter]}{value:g}"}
    return replace(baseline(task), **changes)


def sweep(task: str) -> list[Setting]:
    """All settings of a task, the baseline first, then one changed parameter at a time; 66 over the six tasks."""
    found = [baseline(task)]
    for parameter, values in _SWEEPS[task].items():
        found += [changed(task, parameter, value) for value in values]
    return found


@dataclass(frozen=True)
class MadData:
    """Inputs and targets, int64 [instances, length]; targets that do not count are ``IGNORE`` (-100).

    source: where the data comes from. overlap: share of distinct test inputs that also occur in training.
    """

    setting: Setting
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    source: str
    overlap: float = field(init=False)

    @classmethod
    def of(cls, setting: Setting, train: Arrays, test: Arrays, source: str) -> MadData:
        """From NumPy arrays (inputs, targets) of both sets."""
        import torch

        inputs, targets = map(torch.from_numpy, train)
        test_inputs, test_targets = map(torch.from_numpy, test)
        return cls(setting, inputs, targets, test_inputs, test_targets, source)

    def __post_init__(self) -> None:
        share = overlap(self.train_inputs.numpy(), self.test_inputs.numpy())
        object.__setattr__(self, "overlap", share)
        if share > OVERLAP_WARNING:
            warnings.warn(
                f"{self.setting.id}: {share:.2%} of the distinct test inputs also occur in the training set "
                "(more than 0.1%), so the test also measures memory of the training set",
                stacklevel=3,
            )

    @property
    def train(self) -> TensorDataset:
        """The training set as a torch dataset of (inputs, targets)."""
        return _dataset(self.train_inputs, self.train_targets)

    @property
    def test(self) -> TensorDataset:
        """The test set as a torch dataset of (inputs, targets)."""
        return _dataset(self.test_inputs, self.test_targets)

    def digest(self) -> str:
        """SHA-256 of training inputs and targets, then test inputs and targets, as little-endian int64."""
        found = hashlib.sha256()
        for tensor in (self.train_inputs, self.train_targets, self.test_inputs, self.test_targets):
            found.update(tensor.numpy().astype("<i8").tobytes())
        return found.hexdigest()


def _dataset(*tensors: Tensor) -> TensorDataset:
    from torch.utils.data import TensorDataset

    return TensorDataset(*tensors)


def generate(setting: Setting, seed: int = SEED, *, bit_exact: bool = False, guarantee_probe: bool = False) -> MadData:
    """Training and test set from one generator: the test set continues the stream of the training set.

    bit_exact: use the reference generator's order of draws, which is slow for recall (it shuffles all motifs for every
    instance of fuzzy recall); by default recall is drawn vectorised from the same distribution. The other three tasks
    are always bit-exact. guarantee_probe: fuzzy recall shows the probe at least once before it asks for it.
    """
    exactly = bit_exact or setting.task not in (*RECALL, FUZZY)
    draw = (_instances if exactly else _all_at_once)(setting, seed, guarantee_probe)
    train = draw(setting.num_train_examples, training=True)
    test = draw(setting.num_test_examples, training=False)
    source = f"generated, seed {seed}" + ", bit-exact" * exactly + ", guaranteed probe" * guarantee_probe
    return MadData.of(setting, train, test, source)


def overlap(train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Share of the distinct rows of test that are also rows of train."""
    known = {row.tobytes() for row in train}
    distinct = {row.tobytes() for row in test}
    return len(distinct & known) / len(distinct)


def _all_at_once(setting: Setting, seed: int, guarantee_probe: bool) -> Callable[..., Arrays]:
    """A function (count, training=) -> (inputs, targets) of a recall task; each call continues the stream."""
    rng = np.random.default_rng(seed)
    if setting.task == FUZZY:
        return partial(fast.fuzzy_in_context_recall, setting, rng, guarantee_probe=guarantee_probe)
    return partial(fast.in_context_recall, setting, rng)


def _instances(setting: Setting, seed: int, guarantee_probe: bool) -> Callable[..., Arrays]:
    """The same in the reference generator's order of draws, one instance after another."""
    rng = np.random.default_rng(seed)
    draw: Callable[..., exact.Instance]
    if setting.task in RECALL:
        draw = partial(exact.in_context_recall, setting, rng)
    elif setting.task == FUZZY:
        draw = partial(exact.fuzzy_in_context_recall, setting, rng, guarantee_probe=guarantee_probe)
    elif setting.task == "selective-copying":
        # The reference draws the slots from NumPy's legacy generator.
        draw = partial(exact.selective_copying, setting, rng, np.random.RandomState(seed))
    elif setting.task == "compression":
        draw = partial(exact.compression, setting, rng)
    else:
        draw = partial(exact.memorization, setting, rng, exact.memorization_map(setting, seed))

    def stacked(count: int, *, training: bool) -> Arrays:
        inputs, targets = zip(*(draw(training=training) for _ in range(count)), strict=True)
        return np.stack(inputs), np.stack(targets)

    return stacked


def folder_name(setting: Setting, seed: int = SEED) -> str:
    """The folder name of a setting in the published data sets.

    t-CR_vs-16_sl-128_ntr-12800_nte-1280_km-1_vm-1_mq-1_fn-0#0_nvs-0_ntc-0_s-12345/train/inputs.npy, targets.npy
    """
    return "_".join(f"{key}-{value}".replace(".", "#") for key, value in _fields(setting, seed).items())


def load(setting: Setting, folder: str | Path, seed: int = SEED) -> MadData:
    """Read the data of a setting from a folder of published data sets; shapes and tokens are checked, nothing is unpickled."""
    place = _find(setting, Path(folder), seed)
    splits = {"train": setting.num_train_examples, "test": setting.num_test_examples}
    train, test = (
        (_read(place / split / "inputs.npy", setting, count), _read(place / split / "targets.npy", setting, count))
        for split, count in splits.items()
    )
    return MadData.of(setting, train, test, f"files of {place.name}")


def _fields(setting: Setting, seed: int) -> dict[str, object]:
    return {
        "t": TASKS[setting.task], "vs": setting.vocab_size, "sl": setting.seq_len, "ntr": setting.num_train_examples,
        "nte": setting.num_test_examples, "km": setting.k_motif_size, "vm": setting.v_motif_size, "mq": 1,
        "fn": float(setting.frac_noise), "nvs": setting.noise_vocab_size, "ntc": setting.num_tokens_to_copy, "s": seed,
    }  # fmt: skip


def _find(setting: Setting, folder: Path, seed: int) -> Path:
    """The subfolder whose name has the same values. 0 and 0.0 are equal; a missing field matches."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; expected the unpacked MAD data sets, one folder per setting"
        )
    wanted = {key: _value(str(value)) for key, value in _fields(setting, seed).items() if key != "mq"}
    for place in sorted(folder.iterdir()):
        parts = dict(part.split("-", 1) for part in place.name.split("_") if "-" in part)
        found = {key: _value(parts[key]) for key in wanted if key in parts}
        if {"t", "vs", "sl"} <= set(found) and all(wanted[key] == value for key, value in found.items()):
            return place
    raise FileNotFoundError(
        f"{folder} holds no data for {setting.id}; expected a folder {folder_name(setting, seed)}. "
        "Leave --data out to generate the data instead"
    )


def _value(text: str) -> str | float:
    try:
        return float(text.replace("#", "."))
    except ValueError:
        return text


def _read(file: Path, setting: Setting, count: int) -> NDArray[np.int64]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; expected inputs.npy and targets.npy in train and in test")
    array = np.load(file, allow_pickle=False)
    if array.ndim != 2 or len(array) != count or array.shape[1] != setting.length:
        raise ValueError(f"{file} must hold {count} x {setting.length} tokens, got an array of shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{file} must hold integers, got {array.dtype}")
    tokens = array[array != IGNORE] if file.stem == "targets" else array
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < setting.vocab_size):
        raise ValueError(f"{file} must hold tokens 0 to {setting.vocab_size - 1}, got {tokens.min()} to {tokens.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)
