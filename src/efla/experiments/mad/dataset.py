"""Training and test set of a setting, generated or read from the published files."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from efla.experiments.mad import exact, fast
from efla.experiments.mad.settings import FUZZY, RECALL, Setting

SEED = 12345
OVERLAP_WARNING = 1e-3

Arrays = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class MadData:
    """Inputs and targets, int64 [instances, length]; targets that do not count are ``IGNORE`` (-100).

    source: how the numbers came about. overlap: share of distinct test inputs that also occur in training.
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
        inputs, targets = map(torch.from_numpy, train)
        test_inputs, test_targets = map(torch.from_numpy, test)
        return cls(setting, inputs, targets, test_inputs, test_targets, source)

    def __post_init__(self) -> None:
        share = overlap(self.train_inputs.numpy(), self.test_inputs.numpy())
        object.__setattr__(self, "overlap", share)
        if share > OVERLAP_WARNING:
            warnings.warn(
                f"{self.setting.id}: {share:.2%} of the distinct test inputs also occur in the training set "
                "(more than 0.1%): the test measures memory of the training set too",
                stacklevel=3,
            )

    @property
    def train(self) -> TensorDataset:
        """The training set as a torch dataset of (inputs, targets)."""
        return TensorDataset(self.train_inputs, self.train_targets)

    @property
    def test(self) -> TensorDataset:
        """The test set as a torch dataset of (inputs, targets)."""
        return TensorDataset(self.test_inputs, self.test_targets)

    def digest(self) -> str:
        """SHA-256 of training inputs and targets, then test inputs and targets, as little-endian int64."""
        found = hashlib.sha256()
        for tensor in (self.train_inputs, self.train_targets, self.test_inputs, self.test_targets):
            found.update(tensor.numpy().astype("<i8").tobytes())
        return found.hexdigest()


def generate(setting: Setting, seed: int = SEED, *, bit_exact: bool = False, guarantee_probe: bool = False) -> MadData:
    """Training and test set from one generator with that seed: the test set continues the stream of the training set.

    bit_exact: the reference generator's own order of draws, which is slow for recall (it shuffles all motifs for every
    instance of fuzzy recall); by default recall is drawn side by side from the same distribution. The other three tasks
    are bit-exact always. guarantee_probe: fuzzy recall shows the probe at least once before it asks for it.
    """
    draw = _generator(setting, seed, bit_exact, guarantee_probe)
    train, test = draw(setting.num_train_examples, True), draw(setting.num_test_examples, False)
    exactly = bit_exact or setting.task not in (*RECALL, FUZZY)
    source = (
        f"generated, seed {seed}"
        + (", bit-exact" if exactly else "")
        + (", guaranteed probe" if guarantee_probe else "")
    )
    return MadData.of(setting, train, test, source)


def overlap(train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Share of the distinct rows of test that are rows of train too."""
    known = {row.tobytes() for row in train}
    distinct = {row.tobytes() for row in test}
    return len(distinct & known) / len(distinct)


def _generator(setting: Setting, seed: int, bit_exact: bool, guarantee_probe: bool) -> Callable[[int, bool], Arrays]:
    """A function (count, training) -> (inputs, targets); each call continues the stream."""
    if not bit_exact and setting.task in RECALL:
        rng = np.random.default_rng(seed)
        return lambda count, training: fast.in_context_recall(setting, count, rng, training=training)
    if not bit_exact and setting.task == FUZZY:
        rng = np.random.default_rng(seed)
        return lambda count, training: fast.fuzzy_in_context_recall(
            setting, count, rng, training=training, guarantee_probe=guarantee_probe
        )
    one = _instances(setting, seed, guarantee_probe)

    def stacked(count: int, training: bool) -> Arrays:
        inputs, targets = zip(*(one(training) for _ in range(count)), strict=True)
        return np.stack(inputs), np.stack(targets)

    return stacked


def _instances(setting: Setting, seed: int, guarantee_probe: bool) -> Callable[[bool], exact.Instance]:
    """A function (training) -> next instance, in the reference's order of draws."""
    rng = np.random.default_rng(seed)
    if setting.task in RECALL:
        return lambda training: exact.in_context_recall(setting, rng, training=training)
    if setting.task == FUZZY:
        return lambda training: exact.fuzzy_in_context_recall(
            setting, rng, training=training, guarantee_probe=guarantee_probe
        )
    if setting.task == "selective-copying":
        slots_rng = np.random.RandomState(seed)  # the reference draws the slots from NumPy's legacy generator
        return lambda training: exact.selective_copying(setting, rng, slots_rng)
    if setting.task == "compression":
        return lambda training: exact.compression(setting, rng)
    value_of = exact.memorization_map(setting, seed)
    return lambda training: exact.memorization(setting, rng, value_of)
