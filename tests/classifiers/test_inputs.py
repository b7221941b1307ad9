"""Datasets and base classifiers by URI: real objects for each form, errors that name the valid ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mixednuts_dist.classifiers.base_classifiers import check_classifier, classifier_checksum, load_classifier
from mixednuts_dist.errors import BaseClassifierError, DatasetError
from mixednuts_dist.images.datasets import open_dataset

FACTORY = """
import torch
from torch import nn

def linear(bias=0.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    net[1].bias.data += bias
    return net

def broken():
    raise FileNotFoundError("weights.pt is not here")

def number():
    return 3
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "zoo.py"
    path.write_text(FACTORY)
    return path


def save(path: Path, images: np.ndarray, labels: np.ndarray) -> str:
    np.savez(path, images=images, labels=labels)
    return f"npz:{path}"


def test_digits_are_images_in_range() -> None:
    data = open_dataset("digits")
    images, labels = data.read(5, 9)
    assert images.shape == (4, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert data.checksum(10) != data.checksum(11)


@pytest.mark.parametrize(
    ("shape", "read"), [((6, 4, 5, 3), (6, 3, 4, 5)), ((6, 3, 4, 5), (6, 3, 4, 5)), ((6, 4, 5), (6, 1, 4, 5))]
)
def test_npz_images_come_channels_first_in_unit_range(
    tmp_path: Path, shape: tuple[int, ...], read: tuple[int, ...]
) -> None:
    pixels = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)
    images, labels = open_dataset(save(tmp_path / "a.npz", pixels, np.arange(6))).read(0, 6)
    assert images.shape == read
    assert images.dtype == torch.float32
    assert float(images.max()) <= 1
    assert labels.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((3, 1, 2, 2), np.float32) + 2, np.arange(3), r"range over \[2, 2\]"),
        (np.zeros((3, 1, 2, 2), np.int32), np.arange(3), "int32"),
        (np.zeros((3, 1, 2, 2), np.uint8), np.arange(2), r"\(2,\)"),
        (np.zeros((3, 1, 2, 2), np.uint8), np.array([0, -1, 2]), "from -1"),
    ],
)
def test_arrays_that_are_no_images_are_refused(
    tmp_path: Path, images: np.ndarray, labels: np.ndarray, message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        open_dataset(save(tmp_path / "a.npz", images, labels))


@pytest.mark.parametrize("uri", ["mnits", "npz:nowhere.npz", "s3://bucket/x"])
def test_an_unusable_dataset_is_named(uri: str) -> None:
    with pytest.raises(DatasetError, match="npz:"):
        open_dataset(uri)


def test_missing_cifar_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="download=True"):
        open_dataset(f"cifar10:{tmp_path}")


def test_a_factory_in_a_file_takes_options_and_comes_frozen(factory_file: Path) -> None:
    plain, biased = (load_classifier(f"py:{factory_file}:linear{query}", "rob") for query in ("", "?bias=2.5"))
    x = torch.rand(2, 3, 4, 4)
    assert torch.allclose(plain(x) + 2.5, biased(x))
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    assert not plain.training


def test_a_factory_in_a_module(monkeypatch: pytest.MonkeyPatch, factory_file: Path) -> None:
    monkeypatch.syspath_prepend(str(factory_file.parent))
    assert isinstance(load_classifier("py:zoo:linear", "std"), nn.Module)


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (":linaer", "no factory 'linaer'; it has: linear, broken, number"),
        (":broken", "FileNotFoundError: weights.pt is not here"),
        (":number", "returned int"),
        (":linear?bais=1", "bais"),
    ],
)
def test_a_factory_that_fails_is_explained(factory_file: Path, suffix: str, message: str) -> None:
    with pytest.raises(BaseClassifierError, match=message):
        load_classifier(f"py:{factory_file}{suffix}", "rob")


@pytest.mark.parametrize("uri", ["demo:best", "resnet18", "py:nowhere.py:f", "py:nowhere_at_all:f", "py:zoo.py"])
def test_an_unusable_classifier_is_named(uri: str) -> None:
    with pytest.raises(BaseClassifierError, match=r"rob"):
        load_classifier(uri, "rob")


def test_the_checksum_follows_one_bit_of_the_weights(factory_file: Path) -> None:
    uri = f"py:{factory_file}:linear"
    model, same = load_classifier(uri, "rob"), load_classifier(uri, "rob")
    assert classifier_checksum(model, uri) == classifier_checksum(same, uri)
    with torch.no_grad():
        same[1].weight.view(torch.int32)[0, 0] ^= 1
    assert classifier_checksum(model, uri) != classifier_checksum(same, uri)


class Answer(nn.Module):
    """Says what it is told to say."""

    def __init__(self, say: str) -> None:
        super().__init__()
        self.say = say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x.flatten(1)[:, :4] * 5
        if self.say == "probabilities":
            return logits.softmax(dim=1)
        if self.say == "noise":
            return logits + torch.rand_like(logits)
        if self.say == "nan":
            return logits * torch.nan
        return logits[:, :1] if self.say == "one class" else logits


@pytest.mark.parametrize(
    ("say", "message"),
    [("probabilities", "sums to 1"), ("noise", "random"), ("nan", "NaN"), ("one class", r"\(3, 1\) for 3 images")],
)
def test_outputs_that_are_no_logits_are_told_in_words(say: str, message: str) -> None:
    with pytest.raises(BaseClassifierError, match=message):
        check_classifier(Answer(say), torch.rand(3, 1, 4, 4), "rob")


def test_honest_logits_pass_and_their_classes_are_counted() -> None:
    assert check_classifier(Answer("logits"), torch.rand(3, 1, 4, 4), "rob") == 4
