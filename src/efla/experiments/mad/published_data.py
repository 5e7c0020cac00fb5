"""The published data sets (Zenodo record 10843663): a folder per setting, in it ``train`` and ``test``, in each two arrays.

t-CR_vs-16_sl-128_ntr-12800_nte-1280_km-1_vm-1_mq-1_fn-0#0_nvs-0_ntc-0_s-12345/train/inputs.npy, targets.npy
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from efla.experiments.mad.dataset import SEED, MadData
from efla.experiments.mad.settings import IGNORE, TASKS, Setting


def folder_name(setting: Setting, seed: int = SEED) -> str:
    """The name under which the reference stores a setting."""
    return "_".join(f"{key}-{value}".replace(".", "#") for key, value in _fields(setting, seed).items())


def load(setting: Setting, folder: str | Path, seed: int = SEED) -> MadData:
    """Read a setting's sets from a folder of published data; shapes and tokens are checked, nothing is unpickled."""
    place = _find(setting, Path(folder), seed)
    splits = {"train": setting.num_train_examples, "test": setting.num_test_examples}
    train, test = (
        (
            _read(place / split / "inputs.npy", setting, count, is_target=False),
            _read(place / split / "targets.npy", setting, count, is_target=True),
        )
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
    """The subfolder whose name says the same; 0, 0.0 and a field left out are told apart from nothing else."""
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


def _read(file: Path, setting: Setting, count: int, *, is_target: bool) -> NDArray[np.int64]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; expected inputs.npy and targets.npy in train and in test")
    array = np.load(file, allow_pickle=False)
    if array.ndim != 2 or len(array) != count or array.shape[1] != setting.length:
        raise ValueError(f"{file} must hold {count} x {setting.length} tokens, got an array of shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{file} must hold integers, got {array.dtype}")
    tokens = array[array != IGNORE] if is_target else array
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < setting.vocab_size):
        raise ValueError(f"{file} must hold tokens 0 to {setting.vocab_size - 1}, got {tokens.min()} to {tokens.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)
