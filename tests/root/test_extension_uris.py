"""A data set and a classifier of the user's own, each one decorated function in a file outside of the package."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixednuts_dist.classifiers.base_classifiers import check_classifier, load_classifier
from mixednuts_dist.config.register import CLASSIFIERS, DATASETS, import_file, load_extensions
from mixednuts_dist.config.uris import ClassifierSource, DatasetSource
from mixednuts_dist.errors import BaseClassifierError, DatasetError
from mixednuts_dist.images.datasets import check_images, open_dataset

MINE = """
import numpy as np
import torch
from mixednuts_dist.images.arrays import ArrayImages
from mixednuts_dist.config.register import CLASSIFIERS, DATASETS

@DATASETS("stripes@", describes="striped images", forms=("stripes@:N[?seed=0]",), target="number",
          options={"seed": ("number", "of the stripes")})
def open_stripes(uri):
    n = int(uri.target)
    images = np.random.default_rng(int(uri.option("seed", "0"))).integers(0, 256, (n, 8, 8), np.uint8)
    return ArrayImages(f"stripes@:{n}", images, np.arange(n) % 3)

@CLASSIFIERS("means@", describes="mean of each third of the rows", forms=("means@:K",), target="3|4",
             random_weights=True)
def load_means(uri):
    class Means(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :60].reshape(len(x), int(uri.target), -1).mean(dim=2)
    return Means()
"""


@pytest.fixture
def scheme(tmp_path: Path) -> Iterator[str]:
    """Return the suffix of this test's schemes, and unregister them afterwards."""
    suffix = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]
    (tmp_path / "mine.py").write_text(MINE.replace("@:", f"{suffix}:").replace('@"', f'{suffix}"'))
    load_extensions([str(tmp_path / "mine.py")])
    yield suffix
    for register, name in ((DATASETS, f"stripes{suffix}"), (CLASSIFIERS, f"means{suffix}")):
        del register._added[name], register._made[name]


def test_schemes_of_an_extension_are_listed_checked_and_opened(scheme: str) -> None:
    data, rob = DatasetSource(f"stripes{scheme}:20?seed=3"), ClassifierSource(f"means{scheme}:3")
    data.check("data.uri")
    rob.check("rob")
    assert f"stripes{scheme}:N[?seed=0]" in data.forms()
    assert f"means{scheme}:K" in rob.forms()
    assert rob.without_weights() == f"{rob}?weights=none"
    dataset = open_dataset(data)
    images, labels = dataset.read(5, 13)
    check_images(images, labels, data)
    assert images.shape == (8, 1, 8, 8)
    assert check_classifier(load_classifier(rob, "rob"), images, "rob") == 3


def test_mistakes_in_them_are_told_as_in_our_own(scheme: str) -> None:
    with pytest.raises(DatasetError, match=r"seed='x' is not a whole number"):
        open_dataset(f"stripes{scheme}:20?seed=x")
    with pytest.raises(DatasetError, match=rf"did you mean 'stripes{scheme}'\?"):
        open_dataset(f"stripe{scheme}:20")
    with pytest.raises(DatasetError, match=r"'many' is not a whole number; valid forms: stripes"):
        open_dataset(f"stripes{scheme}:many")
    with pytest.raises(DatasetError, match=r"images \(0, 8, 8\)"):
        open_dataset(f"stripes{scheme}:0")
    with pytest.raises(BaseClassifierError, match="is not one of 3, 4"):
        ClassifierSource(f"means{scheme}:5").check("rob")


def test_an_edit_in_the_same_second_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "edited.py"
    for value in (1, 2):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (0, 0))
        assert value == import_file("edited", path).VALUE
    assert list(tmp_path.iterdir()) == [path]
