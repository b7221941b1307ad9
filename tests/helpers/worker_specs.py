"""The specification of a worker, as a driver hands it over."""

from dataclasses import replace
from pathlib import Path

from mixednuts_dist.classifiers.base_classifiers import classifier_checksum, load_classifier
from mixednuts_dist.config.keys import AttackConfig
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.uris import ClassifierSource, DatasetSource
from mixednuts_dist.distributed.worker_spec import WorkerSpec
from mixednuts_dist.images.datasets import labels_checksum, open_dataset
from mixednuts_dist.stages.attack import Attack
from mixednuts_dist.stages.stage import StageTask


def spec_of(folder: Path, **changes) -> WorkerSpec:
    """Return the spec of a run on the digits in this folder, with a driver's files."""
    classifiers = {name: ClassifierSource(f"demo:{name}") for name in ("std", "rob")}
    checksums = {name: classifier_checksum(load_classifier(uri, name), uri) for name, uri in classifiers.items()}
    checksums["labels"] = labels_checksum(open_dataset("digits"))
    (folder / "run.yaml").write_text(
        "inputs: {n_images: 24, n_classes: 10, image_shape: [], checksums: {}}\nversions: {}\n"
    )  # the driver writes it, and every worker must see it
    threat = ThreatModel("Linf", 0.15)
    spec = unchecked_spec(folder, classifiers=classifiers, checksums=checksums, threat=threat, batch_size=16)
    return replace(spec, **changes)


def unchecked_spec(folder: Path, **changes) -> WorkerSpec:
    """Return a spec without checksums, for workers that load nothing."""
    classifiers = {"rob": ClassifierSource("demo:rob")}
    given = {"threat": ThreatModel("Linf", 0.1), "checksums": {}, "classifiers": classifiers, **changes}
    return WorkerSpec(str(folder), DatasetSource("digits"), **given)


def attack_task(n_iter: int, n_target_classes: int) -> StageTask:
    """Return the task of an attack stage with this budget."""
    keys = AttackConfig(n_iter=n_iter, n_target_classes=n_target_classes)
    return StageTask(stage="attack", content_hash="f0", of=Attack("attack", keys))
