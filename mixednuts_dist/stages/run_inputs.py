"""The inputs of a run: its images and base classifiers, opened and tried once, with their checksums."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config.run_config import RunConfig
from ..errors import BaseClassifierError, ConfigError, DatasetError

_PROBE_IMAGES = 8
_LEAST_CLASSES = 4  # for evaluate.check: the targeted DLR loss of pyautoattack needs a fourth logit


@dataclass(frozen=True)
class Inputs:
    """The properties of the images and classifiers at a configuration's URIs."""

    n_images: int
    n_classes: int
    image_shape: tuple[int, ...]
    checksums: dict[str, str]  # sha256 by key: "data", "labels", "std", "rob"
    masked: list[str] = field(default_factory=list)  # "std" or "rob" if its gradient is zero, so attacks cannot use it
    mixed: bool = False  # whether `rob` is itself a mixed classifier, such as RobustBench's Bai2024MixedNUTS


def inspect_inputs(config: RunConfig) -> Inputs:
    """Open the dataset and both classifiers and try them on a few images, on the CPU.

    Raises:
        DatasetError, BaseClassifierError: if they cannot be used.
        ConfigError: if they contradict `evaluate.check` or `evaluate.rd`.
    """
    from ..attacks.entry import has_gradient
    from ..classifiers.base_classifiers import check_classifier, classifier_checksum, load_classifier
    from ..images.datasets import check_read, labels_checksum, open_dataset
    from ..mixing.classifier import MixedClassifier

    evaluate = config.evaluate
    dataset = open_dataset(config.data.uri)
    n_images = config.data.n or len(dataset)
    if n_images > len(dataset):
        raise DatasetError(f"data.n={n_images}, but {config.data.uri} has {len(dataset)} images")
    images, labels = dataset.read(0, min(_PROBE_IMAGES, n_images))
    check_read(images, labels, config.data.uri)
    checksums = {"data": dataset.checksum(n_images), "labels": labels_checksum(dataset)}
    n_classes, masked, mixed = dict[str, int](), list[str](), False
    for role, source in config.classifiers.items():
        model = load_classifier(source, role)
        n_classes[role] = check_classifier(model, images, role, random=evaluate.eot is not None)
        differentiable = model
        if isinstance(model, MixedClassifier):
            mixed, differentiable, rd = role == "rob", model.rob, model.mixture.rd
            if config.std is None and "rd" in evaluate.model_fields_set and evaluate.rd != rd:
                raise ConfigError(
                    f"evaluate.rd={evaluate.rd} has no effect on rob={source!r}, a mixed classifier whose own "
                    f"surrogate has r_d = {rd}. Remove evaluate.rd"
                )
        by_gradient = role == "rob" and config.attack.method == "apgd"
        if (by_gradient or (role == "std" and not source.is_black_box)) and not has_gradient(differentiable, images):
            masked.append(role)
        if by_gradient and role in masked:
            raise BaseClassifierError(
                f"{role}={source!r} has no gradient. Wrap it in mixednuts_dist.straight_through if a module rounds or "
                "quantizes, or set attack.method: square to compute margins from queries alone."
            )
        checksums[role] = classifier_checksum(model, source)
    if n_classes.get("std", n_classes["rob"]) != n_classes["rob"]:
        raise BaseClassifierError(f"`std` has {n_classes['std']} classes and `rob` {n_classes['rob']}; they must agree")
    if evaluate.check and n_classes["rob"] < _LEAST_CLASSES:
        raise ConfigError(
            f"evaluate.check={evaluate.check} needs {_LEAST_CLASSES} classes or more, and rob={config.rob!r} "
            f"has {n_classes['rob']}; leave the check out"
        )
    largest = int(dataset.labels[:n_images].max())
    if largest >= n_classes["rob"]:
        raise DatasetError(f"{config.data.uri} holds label {largest}; the classifiers have {n_classes['rob']} classes")
    return Inputs(n_images, n_classes["rob"], tuple(images.shape[1:]), checksums, masked, mixed)
