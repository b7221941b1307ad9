"""Image folders and RobustBench's ImageNet subset, compared with RobustBench's own loader and transforms."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench
from mixednuts_dist.errors import DatasetError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.images.image_files import ImageFiles, class_labels, evaluation_names


def draw(path: Path, seed: int, size: tuple[int, int] = (300, 280)) -> None:
    """A picture with structure, as JPEG or PNG by its suffix."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 9, 3), np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for i, name in enumerate(("cats/b.png", "cats/a.jpg", "ants/z.png", "dogs/c.PNG")):
        draw(tmp_path / name, i)
    (tmp_path / "dogs" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def opened(uri: str) -> ImageFiles:
    dataset = open_dataset(uri)
    assert isinstance(dataset, ImageFiles)
    return dataset


def test_a_folder_s_classes_and_files_come_sorted(tree: Path) -> None:
    data = opened(f"folder:{tree}")
    assert data.names == ("ants/z.png", "cats/a.jpg", "cats/b.png", "dogs/c.PNG")
    assert data.labels.tolist() == [0, 1, 1, 2]
    images, labels = data.read(1, 3)
    assert images.shape == (2, 3, 280, 300)
    assert labels.tolist() == [1, 1]
    with Image.open(tree / "cats" / "b.png") as picture:
        assert torch.equal(images[1], torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255))


@pytest.mark.parametrize("name", ["Res256Crop224", "BicubicRes256Crop224", "Res224", "Crop288"])
def test_preprocessing_equals_robustbench_s_of_that_name(tree: Path, name: str) -> None:
    theirs = import_robustbench("robustbench.data").PREPROCESSINGS[name]
    ours, _ = opened(f"folder:{tree}?preprocess={name}").read(0, 4)
    for i, file in enumerate(opened(f"folder:{tree}").names):
        with Image.open(tree / file) as picture:
            assert torch.equal(ours[i], theirs(picture.convert("RGB")))


def test_the_checksum_follows_bytes_labels_and_preprocessing(tree: Path) -> None:
    plain, small = opened(f"folder:{tree}"), opened(f"folder:{tree}?preprocess=Res64")
    sums = {plain.checksum(4), plain.checksum(3), small.checksum(4)}
    content = bytearray((tree / "dogs" / "c.PNG").read_bytes())
    content[-1] ^= 1
    (tree / "dogs" / "c.PNG").write_bytes(content)
    assert len(sums | {plain.checksum(4)}) == 4
    assert plain.checksum(3) in sums


def test_images_that_cannot_be_used_are_named(tree: Path) -> None:
    draw(tree / "cats" / "c.png", 7, size=(50, 60))
    data = opened(f"folder:{tree}")
    with pytest.raises(DatasetError, match=r"cats/b.png is \(3, 280, 300\) and cats/c.png \(3, 60, 50\).*preprocess="):
        data.read(2, 4)
    (tree / "cats" / "c.png").write_bytes((tree / "cats" / "c.png").read_bytes()[:100])
    with pytest.raises(DatasetError, match=r"c\.png is damaged or no image"):
        data.read(3, 4)
    (tree / "cats" / "c.png").unlink()
    with pytest.raises(DatasetError, match=r"there is no file .*c\.png"):
        data.read(3, 4)
    with pytest.raises(DatasetError, match=r"there is no file .*c\.png"):
        data.checksum(5)


def test_folders_without_images_name_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "dogs").mkdir()
    with pytest.raises(DatasetError, match=r"one subfolder per class.*subfolders: dogs"):
        open_dataset(f"folder:{tmp_path}")
    with pytest.raises(DatasetError, match=r"none of RobustBench's 5000 ImageNet.*n09468604/ILSVRC2012_val_00015253"):
        open_dataset(f"imagenet:{tmp_path}")


def test_imagenet_equals_robustbench_names_and_labels(tmp_path: Path) -> None:
    """All 5000 names and labels, and the pixels of the present images, against RobustBench's own loader."""
    for name in class_labels():
        (tmp_path / "val" / name).mkdir(parents=True)
    present = [evaluation_names()[i] for i in (4, 17, 4999)]
    for i, name in enumerate(present):
        draw(tmp_path / "val" / name, i)
    data_module = import_robustbench("robustbench.data")
    theirs = import_robustbench("robustbench.loaders").CustomImageFolder(
        str(tmp_path / "val"), data_module.PREPROCESSINGS["Res256Crop224"]
    )
    assert [str(Path(path).relative_to(tmp_path / "val")) for path, _ in theirs.samples] == list(evaluation_names())
    assert theirs.targets == [class_labels()[name.partition("/")[0]] for name in evaluation_names()]
    ours = opened(f"imagenet:{tmp_path}")
    assert ours.names == tuple(present)
    images, labels = ours.read(0, 3)
    for i, position in enumerate((4, 17, 4999)):
        image, target, _ = theirs[position]
        assert torch.equal(images[i], image)
        assert labels[i] == target
    assert opened(f"imagenet:{tmp_path / 'val'}").names == ours.names
    cubic, _ = opened(f"imagenet:{tmp_path}?preprocess=BicubicRes256Crop224").read(0, 1)
    assert not torch.equal(cubic, images[:1])


def test_order_classes_begins_with_one_image_of_each_class(tmp_path: Path) -> None:
    for name in evaluation_names()[:100]:
        (tmp_path / "val" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "val" / name).touch()
    labels, plain = opened(f"imagenet:{tmp_path}?order=classes").labels, opened(f"imagenet:{tmp_path}")
    n_classes = len(set(plain.labels.tolist()))
    assert labels[:n_classes].tolist() == list(dict.fromkeys(plain.labels.tolist()))
    assert sorted(labels.tolist()) == sorted(plain.labels.tolist())
    assert n_classes < 100
