"""Real pictures at 224 pixels through S3: prepare, attack, search, evaluate with two workers, as a user would."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml

from mixednuts_dist.classifiers.base_classifiers import Normalized, classifier_checksum, load_classifier
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.uris import ClassifierSource, DatasetSource
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.distributed.worker_spec import WorkerSpec
from mixednuts_dist.images.datasets import labels_checksum, open_dataset
from mixednuts_dist.images.image_files import EXTENSIONS
from mixednuts_dist.images.parquet_images import MANIFEST, ImagePart, ImageRows, Manifest, encode_part
from mixednuts_dist.storage.partitions import split_images
from mixednuts_dist.storage.store import Store
from tests.helpers.local_head import Head
from tests.helpers.object_store import ObjectStore
from tests.helpers.real import REAL
from tests.helpers.worker_specs import attack_task

PICTURES = REAL / "imagenet"
N_CLASSES = 16


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One sub-folder a class, as ImageNet's validation set lies on disk."""
    pictures = sorted(path for path in PICTURES.glob("*") if path.suffix.lower() in EXTENSIONS)
    assert len(pictures) == 40
    for path in pictures[:N_CLASSES]:
        folder = tmp_path / "tree" / path.name.partition("_")[0]
        folder.mkdir(parents=True)
        (folder / path.name).symlink_to(path)
    return tmp_path / "tree"


def fitted(images: torch.Tensor, seed: int, path: Path) -> str:
    """A small timm network with random features and a head solved to know these pictures; its URI."""
    name = f"timm:test_byobnet?num_classes={N_CLASSES}"
    model = load_classifier(f"{name}&weights=none&seed={seed}", "rob")
    assert isinstance(model, Normalized)
    net = model.net
    with torch.no_grad():
        features = net.forward_head(net.forward_features((images - model.mean) / model.std), pre_logits=True)
        centred = features - features.mean(dim=0)
        net.head.fc.weight.copy_(10 * torch.linalg.lstsq(centred, torch.eye(N_CLASSES), driver="gelsd").solution.T)
        net.head.fc.bias.copy_(-net.head.fc.weight @ features.mean(dim=0))
    torch.save({"state_dict": net.state_dict()}, path)
    return f"{name}&checkpoint={path}"


@pytest.mark.alone
@pytest.mark.real
@pytest.mark.timeout(420)
def test_real_pictures_go_through_a_bucket_with_two_workers(
    tree: Path, object_store: ObjectStore, tmp_path: Path, cluster: Head
) -> None:
    source, prepared = f"folder:{tree}?preprocess=Res256Crop224", object_store.uri("pictures")
    told = cluster.command("mixednuts", "prepare", source, "--to", prepared)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == f"data: {{uri: parquet:{prepared}}}"
    originals, _ = open_dataset(source).read(0, N_CLASSES)
    images, labels = open_dataset(f"parquet:{prepared}").read(0, N_CLASSES)
    assert torch.equal(images, originals[labels])  # one picture per class, so the label is the position
    for picture in tree.glob("*/*"):
        picture.unlink()  # no worker may need the original tree
    config = {
        "name": "pictures",
        "data": {"uri": f"parquet:{prepared}"},
        "std": fitted(originals, 1, tmp_path / "std.pt"),
        "rob": fitted(originals, 0, tmp_path / "rob.pt"),
        "threat": {"eps": "1/255"},
        "partition_size": 8,
        "attack": {"n_iter": 2, "n_target_classes": 1},
        "precision": "fp32",
        "search": {"beta": 0.5, "betas": [0.5], "scales": [0.5, 5.0], "powers": [1.0], "biases": [0.0], "rounds": 0},
        "evaluate": {"n_iter": 2, "n_target_classes": 1, "n_queries": 4},
        "storage": object_store.uri("runs"),
        "compute": {"num_workers": 2, "batch_size": 8},  # a partition fills a pass without padding
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    shown = cluster.command("mixednuts", "run", str(tmp_path / "config.yaml"), "--json", "--address", cluster.address)
    assert shown.returncode == 0, shown.stderr
    results = json.loads(shown.stdout)
    accuracy = results["accuracy"]
    assert results["n_images"] == N_CLASSES
    assert accuracy["std"]["clean"]["correct"] == accuracy["rob"]["clean"]["correct"] == N_CLASSES
    assert 0 < accuracy["rob"]["robust"]["correct"] < N_CLASSES
    assert 0 < accuracy["mixed"]["robust"]["correct"] <= accuracy["mixed"]["clean"]["correct"]
    stored = Store(object_store.uri("runs/pictures")).all_files()
    for stage in ("attack", "evaluate"):
        parts = [path.rpartition("/")[2] for path in stored if re.match(rf"{stage}/.*part-.*parquet", path)]
        assert sorted(parts) == [part.file_name for part in split_images(N_CLASSES, 8)]


CHEAP_CLASSIFIER = """
import torch
from torch import nn

def pooled(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10))
"""


@pytest.mark.slow
def test_a_worker_s_memory_is_flat_in_the_number_of_images(tmp_path: Path) -> None:
    """In a fresh process, since other tests leave memory that the allocator reuses or returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        grown = processes.submit(grown_mebibytes, tmp_path).result()
    assert grown < 30, f"{grown:.0f} MiB more after 160 more images"


def grown_mebibytes(tmp_path: Path) -> float:
    """320 images of 224 pixels, 190 MB as the float32 that an attack works on; the network costs next to nothing."""
    n_images, size = 320, 16
    pixels = np.random.default_rng(0).integers(0, 256, (size, 3, 224, 224), np.uint8)
    store, parts = Store(str(tmp_path / "images")), []
    for part in split_images(n_images, size):
        rows = ImageRows(np.roll(pixels[: len(part)], part.index, axis=3), np.arange(len(part)) % 10, ("",) * len(part))
        store.write(part.file_name, encode_part(rows, "f"))
        parts.append(ImagePart(part.file_name, part.start, part.stop, rows.sha256))
    labels = tuple(i % size % 10 for i in range(n_images))
    manifest = Manifest(
        source="npz:x", content_hash="f", seed=0, image_shape=(3, 224, 224), parts=tuple(parts), labels=labels
    )
    store.write(MANIFEST, manifest.model_dump_json().encode())
    (tmp_path / "cheap.py").write_text(CHEAP_CLASSIFIER)
    (tmp_path / "run.yaml").write_text("")
    source = ClassifierSource(f"py:{tmp_path / 'cheap.py'}:pooled")
    dataset = open_dataset(f"parquet:{tmp_path / 'images'}")
    checksum = classifier_checksum(load_classifier(source, "rob"), source)
    spec = WorkerSpec(
        store_uri=str(tmp_path), data=DatasetSource(dataset.uri), classifiers={"std": source, "rob": source},
        checksums={"labels": labels_checksum(dataset), "std": checksum, "rob": checksum},
        threat=ThreatModel("Linf", 0.01), batch_size=size,
    )  # fmt: skip
    worker, memory, process = AttackWorker(spec), [], psutil.Process()
    worker.ready()
    for partition in split_images(n_images, size):
        worker.process(partition, attack_task(1, 1))
        memory.append(process.memory_info().rss)
    half = len(memory) // 2
    return (max(memory[half:]) - max(memory[:half])) / 2**20  # a partition's peak varies by 50 MiB
