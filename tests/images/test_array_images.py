"""Arrays: slices of .npz files equal the whole, digits equal scikit-learn's, and wrong arrays raise."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from sklearn.datasets import load_digits

from mixednuts_dist.errors import DatasetError
from mixednuts_dist.images.arrays import ArrayImages, load_digits_split
from mixednuts_dist.images.datasets import open_dataset

PIXELS = np.random.default_rng(0).integers(0, 256, (50, 6, 7, 3), np.uint8)
LABELS = np.arange(50) % 4


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
@pytest.mark.parametrize(
    "pixels",
    [PIXELS, PIXELS.astype(np.float32) / 255, np.asfortranarray(PIXELS)],
    ids=["uint8", "float32", "columns first"],
)
def test_slices_equal_the_whole(tmp_path: Path, save: "np.ufunc", pixels: np.ndarray) -> None:
    save(tmp_path / "a.npz", images=pixels, labels=LABELS)
    data = open_dataset(f"npz:{tmp_path / 'a.npz'}")
    whole = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).float().div(255)
    for start, stop in ((0, 50), (7, 19), (49, 60), (3, 3)):
        images, labels = data.read(start, stop)
        assert torch.equal(images, whole[start:stop])
        assert labels.tolist() == LABELS[start:stop].tolist()
    in_memory = ArrayImages("x", pixels, LABELS)
    assert data.checksum(20) == in_memory.checksum(20) != in_memory.checksum(21)


def test_an_open_file_is_not_held_in_memory(tmp_path: Path) -> None:
    n_bytes = 200 << 20
    np.savez(
        tmp_path / "large.npz",
        images=np.zeros((n_bytes // 3072, 3, 32, 32), np.uint8),
        labels=np.zeros(n_bytes // 3072, int),
    )
    process = psutil.Process()
    before = process.memory_info().rss
    data = open_dataset(f"npz:{tmp_path / 'large.npz'}")
    data.read(60000, 60100)
    data.checksum(5000)
    assert process.memory_info().rss - before < n_bytes / 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": PIXELS}, r"holds \['images'\]; it needs the arrays images and labels"),
        ({"images": np.full(50, None), "labels": LABELS}, "objects"),
        ({"images": PIXELS[0, 0, 0], "labels": LABELS}, r"images \(3,\)"),
    ],
)
def test_files_without_images_and_labels_raise(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DatasetError, match=message):
        open_dataset(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("largest", [1, 2])
def test_uint8_of_zeros_and_ones_is_warned_of(largest: int, caplog: pytest.LogCaptureFixture) -> None:
    ArrayImages("x", np.full((2, 6, 7), largest, np.uint8), LABELS[:2])
    assert ("uint8 and all 0 or 1, which counts as black" in caplog.text) == (largest == 1)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 3, 3)), np.array([0, 2**64 - 1], np.uint64), "found uint64 from 0 to 18446744073709551615"),
        (np.zeros((2, 3, 3)), np.array(["cat", "dog"]), "found <U3"),
        (np.zeros((2, 3, 3)), np.array([-1, 0]), "from -1"),
        (np.zeros((2, 3, 3)), np.array([0.0, 1.0]), "float64"),
        (np.full((2, 3, 3), np.nan), np.array([0, 1]), r"range over \[nan, nan\]"),
        (np.full((2, 3, 3), 1.01), np.array([0, 1]), "range over"),
        (np.zeros((2, 3, 3), np.int32), np.array([0, 1]), "pixels are int32"),
        (np.zeros((2, 3, 3), bool), np.array([0, 1]), "pixels are bool"),
        (np.zeros((2, 3, 3), np.complex64), np.array([0, 1]), "pixels are complex64"),
        (np.zeros((2, 0, 3)), np.array([0, 1]), "are not N images"),
        (np.zeros((2, 3, 3)), np.array([0]), r"\(1,\)"),
    ],
)
def test_arrays_that_are_not_images_with_labels_raise(images: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        ArrayImages("x", images, labels)


@pytest.mark.parametrize(
    ("shape", "read"), [((6, 4, 5, 3), (6, 3, 4, 5)), ((6, 3, 4, 5), (6, 3, 4, 5)), ((6, 4, 5), (6, 1, 4, 5))]
)
def test_images_come_channels_first_in_any_byte_order(shape: tuple[int, ...], read: tuple[int, ...]) -> None:
    pixels, labels = np.random.default_rng(0).random(shape), np.arange(6)
    big, little = (
        ArrayImages("x", pixels.astype(f"{order}f4"), labels.astype(f"{order}i8")).read(0, 6) for order in "><"
    )
    assert (big[0].shape, big[0].dtype) == (read, torch.float32)
    assert torch.equal(big[0], little[0]) and torch.equal(big[1], little[1])


def test_missing_cifar_raises_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="download=True"):
        open_dataset(f"cifar10:{tmp_path}")


def test_halves_of_the_digits_are_the_rows_in_their_order() -> None:
    digits = load_digits()
    (train_images, train_labels), (test_images, test_labels) = load_digits_split("train"), load_digits_split("test")
    images, labels = torch.cat([train_images, test_images]), torch.cat([train_labels, test_labels])
    assert torch.equal(images[:, 0] * 16, torch.tensor(digits.images, dtype=torch.float32))
    assert torch.equal(labels, torch.tensor(digits.target, dtype=torch.int64))
    assert (len(train_labels), len(test_labels)) == (898, 899)
