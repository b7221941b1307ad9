"""`mixednuts prepare` in this process and on Ray: balanced parts, resumed, repaired, and never mixed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mixednuts_dist.config.keys import ComputeConfig
from mixednuts_dist.distributed import preparation
from mixednuts_dist.distributed.executor import executing
from mixednuts_dist.distributed.preparation import PartDone
from mixednuts_dist.errors import DatasetError, PartitionFailed
from mixednuts_dist.images.datasets import open_dataset

N_CLASSES = 5
Prepare = Callable[[str], list[bool]]


@pytest.fixture
def source(tmp_path: Path) -> str:
    """70 images of 5 classes, sorted by class, as CIFAR-like arrays."""
    return arrays(tmp_path / "source.npz", 0)


def arrays(file: Path, seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (70, 8, 8, 3), np.uint8)
    np.savez_compressed(file, images=pixels, labels=np.sort(np.arange(70) % N_CLASSES))
    return f"npz:{file}"


@pytest.fixture
def write(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepare]:
    """Prepare into one folder; the function returns which of the parts, in order, existed before."""
    executor = request.getfixturevalue(getattr(request, "param", "local_executor"))

    monkeypatch.setattr(preparation, "PART_SIZE", 10)

    def run(uri: str) -> list[bool]:
        told: list[tuple[PartDone, int]] = []
        made = preparation.run(
            uri, str(tmp_path / "out"), executor=executor, on_part=lambda part, n: told.append((part, n))
        )
        assert {n for _, n in told} == {len(made.labels)}
        return [part.was_there for part, _ in sorted(told, key=lambda item: item[0].part.start)]

    with executing(executor, ComputeConfig()):
        yield run


def test_parts_hold_every_image_once_balanced_and_need_no_source(source: str, write: Prepare, tmp_path: Path) -> None:
    assert write(source) == [False] * 7
    original = open_dataset(source)
    pixels, labels = original.read(0, 70)
    (tmp_path / "source.npz").unlink()
    data = open_dataset(f"parquet:{tmp_path / 'out'}")
    images, found = data.read(0, 70)
    place = {image.numpy().tobytes(): i for i, image in enumerate(pixels)}
    order = [place[image.numpy().tobytes()] for image in images]
    assert sorted(order) == list(range(70))
    assert torch.equal(found, labels[order])
    for start in range(0, 70, 10):
        assert np.bincount(data.labels[start : start + 10], minlength=N_CLASSES).tolist() == [2] * N_CLASSES


def test_a_second_run_writes_only_what_is_missing_or_damaged(source: str, write: Prepare, tmp_path: Path) -> None:
    write(source)
    parts = sorted((tmp_path / "out").glob("part-*.parquet"))
    before = {path.name: path.read_bytes() for path in parts}
    assert write(source) == [True] * 7
    parts[2].unlink()
    broken = bytearray(before[parts[4].name])
    broken[len(broken) // 3] ^= 1
    parts[4].write_bytes(broken)
    (tmp_path / "out" / "manifest.json").unlink()  # as after an interruption
    assert write(source) == [True, True, False, True, False, True, True]
    assert {path.name: path.read_bytes() for path in parts} == before
    other = arrays(tmp_path / "other.npz", 1)
    with pytest.raises(DatasetError, match=r"already holds other images \(70 images of npz:"):
        write(other)
    (tmp_path / "out" / "manifest.json").unlink()
    assert write(other) == [False] * 7, "parts of other images are not kept"


@pytest.mark.slow
@pytest.mark.parametrize("write", ["ray_executor"], indirect=True)
def test_unreadable_image_is_named_across_the_cluster(write: Prepare, tmp_path: Path) -> None:
    for i in range(12):
        path = tmp_path / "tree" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    with pytest.raises(PartitionFailed, match=r"DatasetError: .*class1/11\.png is damaged or no image"):
        write(f"folder:{tmp_path / 'tree'}")
    assert not (tmp_path / "out" / "manifest.json").exists()
    path.write_bytes(whole)
    assert len(write(f"folder:{tmp_path / 'tree'}")) == 2
    data = open_dataset(f"parquet:{tmp_path / 'out'}")
    assert sorted(data.read(0, 12)[0][:, 0, 0, 0].mul(255).round().int().tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("uri", "message"),
    [("digits", "not multiples of 1/255"), ("parquet:somewhere", "is prepared already"), ("cifar9", "valid forms")],
)
def test_what_cannot_be_prepared_is_told(write: Prepare, uri: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        write(uri)
