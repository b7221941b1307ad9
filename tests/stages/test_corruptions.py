"""Common corruptions: the stage equals plain forward passes, the loaders read the published layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.deployment.loading import read_run
from mixednuts_dist.errors import ConfigError, DatasetError
from mixednuts_dist.images.corruptions import ALEXNET_ERRORS, COMMON, SEVERITIES, THREE_D
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.images.image_files import evaluation_names
from mixednuts_dist.reports.tables import file_name
from mixednuts_dist.stages.corruptions import Corruptions, mean_corruption_error
from mixednuts_dist.stages.runs import open_run
from mixednuts_dist.stages.stage import stage_of
from mixednuts_dist.studies import study
from tests.images.corrupted import OPERATIONS, write_arrays

N = 24
NAMES = ["gaussian_noise", "contrast"]


def digits_of(n: int) -> tuple[Any, Any]:
    images, labels = open_dataset("digits").read(0, n)
    return (images[:, 0] * 255).round().byte().numpy(), labels.numpy()


@pytest.fixture(scope="module")
def corrupted_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arrays(tmp_path_factory.mktemp("corrupted") / "digits-c", *digits_of(N))


def asking(tiny: Callable[..., RunConfig], root: Path, **changes: Any) -> RunConfig:
    return tiny(corruptions={"data": f"corrupted:{root}", "corruptions": NAMES}, **changes)


@pytest.mark.usefixtures("no_pictures")
def test_every_number_is_that_of_plain_forward_passes(
    tiny: Callable[..., RunConfig], corrupted_digits: Path, local_executor: Any
) -> None:
    config = asking(tiny, corrupted_digits)
    results = pipeline.run(config, executor=local_executor)
    opened, stage = open_run(config), stage_of(config, "corruptions")
    assert isinstance(stage, Corruptions)
    mixed = read_run(opened.store.uri).classifier()
    clean, right_MCSN = stage.right(opened)
    names = list(clean)
    assert names[:3] == ["std", "rob", "mixed"]
    assert len(names) == 3 + len(config.search.betas)
    expected = {"std": mixed.std, "rob": mixed.rob, "mixed": mixed}
    for place, name in enumerate(names[:3]):
        for row, corruption in enumerate(NAMES):
            for severity in SEVERITIES:
                x, y = open_dataset(f"corrupted:{corrupted_digits}?corruption={corruption}&severity={severity}").read(
                    0, N
                )
                found = right_MCSN[place, row, severity - 1]
                assert torch.equal(found, expected[name](x).argmax(dim=1) == y)
    shown = results.to_json()["stages"]
    every = right_MCSN[2].flatten(0, 1).all(dim=0)
    assert shown["mixed, corrupted"]["robust"]["correct"] == int(every.sum())
    title, other = (title for title in results.tables if "corruption" in title)
    assert file_name(title) != file_name(other), "one file would replace the other"
    table = results.tables[title]
    assert [row[0] for row in table.rows] == names
    assert table.columns[-1] == "mCE against std (%)"
    assert table.rows[0][-1] in (100.0, None)  # std against itself; None where it makes no mistake
    assert [row[0] for row in results.tables[other].rows] == NAMES
    assert config.run_id() == tiny().run_id()  # a stage that is added to a finished run


def test_a_study_draws_it_and_a_run_without_the_key_is_told_of_it(
    tiny: Callable[..., RunConfig], corrupted_digits: Path, local_executor: Any
) -> None:
    config = asking(tiny, corrupted_digits)
    (outcome,) = study.run(config, "corruptions", executor=local_executor).values()
    assert [row[0] for row in outcome.table.rows] == ["std", "rob", "mixed"]
    content = json.loads((Path(config.storage) / config.run_id() / "studies/corruptions/study.json").read_text())
    assert content["findings"]


def test_mean_corruption_error_by_hand() -> None:
    right_CSN = torch.tensor([[[True, False], [True, True]], [[False, False], [True, False]]])  # errors 1/4 and 3/4
    assert mean_corruption_error(right_CSN, [0.5, 0.5]) == 100.0
    assert mean_corruption_error(right_CSN, [0.25, 0.25]) == 200.0
    assert mean_corruption_error(right_CSN, [0.5, 0.0]) is None


def test_other_images_and_missing_corruptions_are_refused_before_any_pass(
    tiny: Callable[..., RunConfig], tmp_path: Path, corrupted_digits: Path, local_executor: Any
) -> None:
    images, labels = digits_of(N)
    other = write_arrays(tmp_path / "other", images, labels[::-1].copy())
    config = asking(tiny, other)
    with pytest.raises(DatasetError, match="has other images or labels than the first 24 of digits"):
        pipeline.run(config, executor=local_executor)
    config = tiny(corruptions={"data": f"corrupted:{corrupted_digits}", "corruptions": ["fog"]})
    with pytest.raises(DatasetError, match="has no 'fog'; it has: brightness, contrast, gaussian_blur"):
        pipeline.run(config, executor=local_executor)
    with pytest.raises(ConfigError, match="'digits:x' is no set of corruptions; valid: cifar10c:ROOT"):
        tiny(corruptions={"data": "digits:x"})


# --- loaders ----------------------------------------------------------------------------------------------------------


def test_arrays_are_read_as_published(tmp_path: Path) -> None:
    """CIFAR-10-C: uint8 (5 N, 32, 32, 3), severity by severity, labels repeated; here N = 3."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    root = write_arrays(tmp_path / "CIFAR-10-C", pixels, np.array([3, 8, 8]))
    for scheme in ("cifar10c", "cifar100c"):
        dataset = open_dataset(f"{scheme}:{root}?corruption=brightness&severity=4")
        assert len(dataset) == 3
        x, y = dataset.read(1, 3)
        stored = np.load(root / "brightness.npy")[3 * 3 + 1 : 3 * 3 + 3]
        assert torch.equal(x, torch.from_numpy(stored).permute(0, 3, 1, 2).float().div(255))
        assert y.tolist() == [8, 8]


def test_folders_are_read_as_published(tmp_path: Path) -> None:
    """ImageNet-C: ROOT/fog/3/n01440764/ILSVRC2012_val_00000293.JPEG, 224 x 224; here two of RobustBench's images."""
    names = evaluation_names()[:2]
    for name in names:
        path = tmp_path / "fog" / "3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (224, 224), (10, 20, 30)).save(path, quality=100)
    dataset = open_dataset(f"imagenetc:{tmp_path}?corruption=fog&severity=3")
    x, _ = dataset.read(0, 2)
    assert x.shape == (2, 3, 224, 224)
    assert dataset.names == names  # type: ignore[attr-defined]
    with pytest.raises(DatasetError, match=r"none of RobustBench's images is under .*fog/4; .* has the severities 3$"):
        open_dataset(f"imagenet3dcc:{tmp_path}?corruption=fog&severity=4")


def test_a_set_without_a_corruption_or_with_other_lengths_is_refused(tmp_path: Path, corrupted_digits: Path) -> None:
    with pytest.raises(DatasetError, match=r"name one, as in corrupted:.*\?corruption=fog&severity=3"):
        open_dataset(f"corrupted:{corrupted_digits}")
    with pytest.raises(DatasetError, match="severity='6' is not one of 1, 2, 3, 4, 5"):
        open_dataset(f"corrupted:{corrupted_digits}?corruption=contrast&severity=6")
    np.save(tmp_path / "fog.npy", np.zeros((9, 8, 8), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(9, np.int64))
    with pytest.raises(DatasetError, match="not as many images with labels at each of 5 severities"):
        open_dataset(f"corrupted:{tmp_path}?corruption=fog&severity=1")
    np.save(tmp_path / "labels.npy", np.array([{}] * 9), allow_pickle=True)
    with pytest.raises(DatasetError, match=r"labels\.npy is missing or no array"):
        open_dataset(f"corrupted:{tmp_path}?corruption=fog&severity=1")


def test_the_published_names() -> None:
    assert (len(COMMON), len(THREE_D), len(set(COMMON) | set(THREE_D))) == (15, 12, 27)
    assert tuple(ALEXNET_ERRORS) == COMMON
    assert set(OPERATIONS) >= set(NAMES)
