"""A run's folder: its identity in `run.yaml`, which partitions are finished, and how long each stage took."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import yaml

from ..config.config_file import read_json
from ..config.run_config import RESULTS_VERSION, RUNS, RunConfig, digest, parse_config
from ..config.search_config import criterion_stage
from ..config.uris import check_uris, is_black_box, needs_trust
from ..errors import (
    BaseClassifierError,
    ConfigError,
    DamagedFile,
    DatasetError,
    FingerprintMismatch,
    MissingArtifact,
    StoreError,
)
from ..storage.code_files import keep_code, places
from ..storage.index import finished_files
from ..storage.outages import FIRST_ANSWER_SECONDS, PATIENCE_SECONDS
from ..storage.partitions import Partition, Sample, partition_size_of, split_images
from ..storage.records import Receipt, SearchResult
from ..storage.run_file import LAST_KEY, RUN, parse_run_file, read_run_file
from ..storage.store import Store

if TYPE_CHECKING:  # what only looks at a run does without PyTorch
    from torch import Tensor, nn

    from ..images.datasets import Dataset

logger = logging.getLogger(__name__)

# The most logits and images that the search reads, so that with all copies and resamples the driver stays below 2 GB.
# (On a grid of 512 candidates 100,000 images took 2.2 GB, and a minute a beta for the resamples.)
MOST_LOGITS, MOST_IMAGES = 5_000_000, 50_000
_PROBE_IMAGES = 8
_POINTS = "given points"  # `evaluate.points` among the inputs' checksums
_SECONDS = "seconds.json"
_CURRENT = "current.json"  # the stage that a driver works on, which `status` shows during refinement rounds
_LEAST_CLASSES = 4  # of evaluate.check: pyautoattack's targeted DLR loss needs the fourth logit
SELECTED = "search/selected.json"
RESULTS = "report/results.json"  # with it the report is whole; report/index.html is there while a run goes, too
_VERSIONED = ("mixednuts-dist", "torch", "ray", "pyautoattack", "numpy", "pyarrow")


@dataclass(frozen=True)
class Inputs:
    """What was found at a configuration's URIs."""

    n_images: int
    n_classes: int
    image_shape: tuple[int, ...]
    checksums: dict[str, str]  # sha256 of "data", "labels", "std", "rob", "given points", as there are any
    masked: list[str] = field(default_factory=list)  # "std" or "rob" if its gradient is zero, so attacks are blind
    mixed: bool = False  # whether `rob` is itself a mixed classifier, such as RobustBench's Bai2024MixedNUTS


@dataclass(frozen=True)
class Run:
    """An opened run."""

    config: RunConfig
    store: Store  # of the run's own files: `<storage>/<name>/runs/<run id>`
    rows: Store  # of the rows that runs of one name share: `<storage>/<name>`
    inputs: Inputs
    only: tuple[Partition, ...] | None = None  # those that count, where an evaluation was ended early

    @functools.cached_property
    def partitions(self) -> list[Partition]:
        if self.only is not None:
            return list(self.only)
        return split_images(self.inputs.n_images, self.partition_size)

    @functools.cached_property
    def searched(self) -> Run:
        """The run cut to the whole partitions that hold the images of `search.first`."""
        first = self.config.search.first
        if first is None or first >= self.inputs.n_images:
            return self
        return replace(self, only=tuple(part for part in self.partitions if part.start < first))

    @property
    def partition_size(self) -> int:
        """Images per partition."""
        return partition_size_of(self.inputs.n_images, self.config.partition_size)

    @property
    def attack_fingerprint(self) -> str:
        """8 hex digits of all that the attack stage's rows depend on, weights and images included."""
        checksums = {what: value for what, value in self.inputs.checksums.items() if what != _POINTS}
        return digest({**self.config.attack_determinants(), "checksums": checksums})


def open_run(config: RunConfig) -> Run:
    """Inspect the inputs, and write `run.yaml` or compare it with the one that is there.

    A storage that cannot be reached or written raises here, before the images and the classifiers are loaded.

    Raises:
        DatasetError, BaseClassifierError, ConfigError: where the inputs cannot be used.
        FingerprintMismatch: where the weights or images have changed since the run began.
        StoreError: where the storage does not answer, or (ReadOnlyStorage) takes no files.
    """
    check_uris(**{key: None if key in config.objects else uri for key, uri in _uris(config).items()})
    impatient = run_store(config, FIRST_ANSWER_SECONDS)
    impatient.exists(RUN)  # a wrong address or key
    impatient.require_writable()
    run = Run(config, run_store(config), rows_store(config), inspect_inputs(config))
    _write_or_compare(impatient, run)
    run.rows.sweep()
    return run


def reopen_run(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Run:
    """A run that an earlier stage has opened, without loading a classifier.

    Raises:
        MissingArtifact: where no stage has.
    """
    store = run_store(config, patience_seconds)
    if not store.exists(RUN):
        raise MissingArtifact(f"run {config.run_id()} has not begun under {config.storage}. Run: mixednuts attack")
    return Run(config, store, rows_store(config, patience_seconds), _read_inputs(store))


def stored_run(store: Store, *, trusted: bool = False) -> Run:
    """A run as its own folder says it, without its configuration file.

    Args:
        trusted: whether its extensions are imported, and files that its stages name read; else it is refused for
            them.

    Raises:
        MissingArtifact: where there is none.
        DamagedFile: where `run.yaml` is not what was written.
        ConfigError: for a configuration that this release does not read, an extension that is not here, or a run that
            is not trusted and needs to be.
    """
    if not store.exists(RUN):
        raise MissingArtifact(f"{store.uri} holds no run: there is no {RUN} in it. Give a run's folder or URI")
    inputs, described = _read_inputs(store), read_run_file(store)
    address, content = store.address(RUN), described["config"]
    if not trusted and isinstance(content, dict) and content.get("extensions"):
        raise ConfigError(needs_trust(store.uri, {"extensions": str(content["extensions"])}))
    config = parse_config(content, address, folder=described.get("folder") or "", find=places(store, described))
    if not trusted and (outside := config.outside_of_stages()):
        raise ConfigError(needs_trust(store.uri, outside))
    config._trusted = trusted
    return Run(config, store, rows_beside(store, config), inputs)


def run_store(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Store:
    """Return the store of a run's own files, `<storage>/<name>/runs/<run id>`."""
    return Store(config.storage, patience_seconds).child(config.place())


def rows_store(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Store:
    """Return the store of the rows that runs of one name share, `<storage>/<name>`."""
    return Store(config.storage, patience_seconds).child(config.name)


def rows_beside(store: Store, config: RunConfig) -> Store:
    """Return the store of the rows next to a run's folder or, if the folder was copied elsewhere, in its storage."""
    above, _, runs = store.uri.rstrip("/").rpartition("/")[0].rpartition("/")
    return store.at(above) if runs == RUNS else rows_store(config)


def _write_or_compare(store: Store, run: Run) -> None:
    """Write `run.yaml`, or compare the inputs with those in the existing file; a damaged file is replaced."""
    content = _run_yaml(run).encode()
    if store.create(RUN, content):
        return
    try:
        _require_same_inputs(run, _read_inputs(store))
    except DamagedFile as error:
        logger.warning("%s", error)
        store.set_aside(RUN, unless=_says_inputs)
        store.create(RUN, content)


def _uris(config: RunConfig) -> dict[str, str | None]:
    return {"data": config.data.uri, "std": config.std, "rob": config.rob}


def run_dataset(config: RunConfig) -> Dataset:
    """The dataset of a run: the one that the caller passed, or the one that its URI names."""
    from ..images.datasets import open_dataset

    dataset: Dataset = config.objects["data"] if "data" in config.objects else open_dataset(config.data.uri)
    return dataset


def run_classifier(config: RunConfig, role: str) -> nn.Module:
    """The base classifier "std" or "rob" of a run: a copy of what the caller passed, or what its URI names."""
    from ..classifiers.base_classifiers import copied, load_classifier

    if role in config.objects:
        return copied(config.objects[role])
    return load_classifier(str(_uris(config)[role]), role)


def inspect_inputs(config: RunConfig) -> Inputs:
    """Open the dataset and both classifiers and try them on a few images, on the CPU.

    Raises:
        DatasetError, BaseClassifierError: where they cannot be used.
        ConfigError: for a second opinion that cannot attack so few classes.
    """
    from ..attacks.red_flags import has_gradient
    from ..classifiers.base_classifiers import check_classifier, classifier_checksum
    from ..images.datasets import check_images, labels_checksum
    from ..mixing.classifier import MixedClassifier

    dataset = run_dataset(config)
    n_images = _n_images(config, dataset)
    images, labels = dataset.read(0, min(_PROBE_IMAGES, n_images))
    check_images(images, labels, config.data.uri)
    checksums = {"data": dataset.checksum(n_images), "labels": labels_checksum(dataset)}
    n_classes, masked, mixed = dict[str, int](), list[str](), False
    for role, uri in (("std", config.std), ("rob", config.rob)):
        if uri is None:
            continue
        model = run_classifier(config, role)
        n_classes[role] = check_classifier(model, images, role, random=config.evaluate.eot is not None)
        mixed = role == "rob" and isinstance(model, MixedClassifier)
        differentiable = model.rob if isinstance(model, MixedClassifier) else model
        by_gradient = role == "rob" and config.attack.method == "apgd"
        if (by_gradient or (role == "std" and not is_black_box(uri))) and not has_gradient(differentiable, images):
            masked.append(role)
        if by_gradient and role in masked:
            raise BaseClassifierError(
                f"{role}={uri!r} has no gradient. Wrap it in mixednuts_dist.straight_through if a module rounds or "
                "quantizes, or set attack.method: square for margins from its answers alone."
            )
        checksums[role] = classifier_checksum(model, uri)
    if n_classes.get("std", n_classes["rob"]) != n_classes["rob"]:
        raise BaseClassifierError(f"`std` has {n_classes['std']} classes and `rob` {n_classes['rob']}; they must agree")
    if config.evaluate.check and n_classes["rob"] < _LEAST_CLASSES:
        raise ConfigError(
            f"evaluate.check={config.evaluate.check} needs {_LEAST_CLASSES} classes or more, and rob={config.rob!r} "
            f"has {n_classes['rob']}; leave the check out"
        )
    largest = int(dataset.labels[:n_images].max())
    if largest >= n_classes["rob"]:
        raise DatasetError(f"{config.data.uri} holds label {largest}; the classifiers have {n_classes['rob']} classes")
    if config.evaluate.points is not None:
        checksums[_POINTS] = _checked_points(config, config.evaluate.points, n_images, images)
    return Inputs(n_images, n_classes["rob"], tuple(images.shape[1:]), checksums, masked, mixed)


def _checked_points(config: RunConfig, path: str, n_images: int, images: Tensor) -> str:
    """Their checksum, where those of the probe images count at all."""
    from ..images.points import points_checksum, read_points_file

    given, threat = read_points_file(path), config.threat.threat_model()
    given.require_of(n_images, images)
    held = given.held_against(range(len(images)), images, threat)
    if bool(held.given.any()) and not bool(held.counts.any()):
        nearest = float(held.distance[held.given].min())
        raise DatasetError(
            f"{path}: none of the first {len(images)} adversarial images is in [0, 1] and within {threat}; the "
            f"nearest is {nearest:.3g} away: are they of other images, or in another order? Give their sample_id"
        )
    return points_checksum(path)


def _n_images(config: RunConfig, dataset: Dataset) -> int:
    wanted = config.data.n or len(dataset)
    if wanted > len(dataset):
        raise DatasetError(f"data.n={wanted}, but {config.data.uri} has {len(dataset)} images")
    return wanted


def _run_yaml(run: Run) -> str:
    versions = {name: importlib.metadata.version(name) for name in _VERSIONED}
    content = {
        "version": RESULTS_VERSION,
        "run_id": run.config.run_id(),
        "attack_fingerprint": run.attack_fingerprint,
        "inputs": {**asdict(run.inputs), "image_shape": list(run.inputs.image_shape)},
        "config": run.config.as_written(),
        "folder": run.config.folder,
        "code": keep_code(run.store, run.config.code_files()),
        LAST_KEY: {"python": platform.python_version(), **versions},
    }
    return yaml.safe_dump(content, sort_keys=False)


def _read_inputs(store: Store) -> Inputs:
    return _parse_inputs(store.read(RUN), store.address(RUN))


def _parse_inputs(run_yaml: bytes, address: str) -> Inputs:
    inputs = parse_run_file(run_yaml, address)["inputs"]
    try:
        return Inputs(**{**inputs, "image_shape": tuple(inputs["image_shape"])})
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"{address} is damaged ({error}); the next `mixednuts run` writes it again", address
        ) from error


def _says_inputs(run_yaml: bytes) -> bool:
    try:
        return bool(_parse_inputs(run_yaml, RUN))
    except DamagedFile:
        return False


def _require_same_inputs(run: Run, stored: Inputs) -> None:
    changed = [key for key, value in run.inputs.checksums.items() if stored.checksums.get(key) != value]
    if changed or stored != run.inputs:
        was, now = stored.checksums, run.inputs.checksums
        what = ", ".join(f"{key} was {was.get(key, '?')[:12]} and is {now[key][:12]}" for key in changed)
        raise FingerprintMismatch(
            f"the inputs of run {run.config.run_id()} have changed since it began ({what or 'images'}): "
            f"its stored rows are not theirs. Give the run another name, or delete {run.store.uri}"
        )


def finished_partitions(run: Run, stage: str, fingerprint: str) -> dict[Partition, Receipt]:
    """The partitions whose file is there and whole; a damaged file counts as missing.

    Raises:
        FingerprintMismatch: where a file is of another run.
    """
    return finished_files(run.rows, stage, run.partitions, fingerprint)


def searched_images(run: Run) -> Tensor | None:
    """The ascending ids of the images that the search reads; None for all images."""
    sample = search_sample(run)
    return None if sample is None else sample.ids()


def search_sample(run: Run) -> Sample | None:
    """The numbers from which workers draw the same ids: `search.sample` images of the first `search.first`."""
    search, n_images = run.config.search, run.inputs.n_images
    asked = min(MOST_IMAGES, MOST_LOGITS // run.inputs.n_classes) if search.sample == "auto" else search.sample
    n_first = min(search.first or n_images, n_images)
    return None if asked >= n_images == n_first else Sample(n_first, min(asked, n_first), run.config.seed)


def require_complete(run: Run, stage: str, fingerprint: str) -> dict[Partition, Receipt]:
    """The receipts of all partitions, where every one is finished.

    Raises:
        MissingArtifact: naming how many are done, which are missing, and the command that computes them.
    """
    finished = finished_partitions(run, stage, fingerprint)
    missing = [str(partition.index) for partition in run.partitions if partition not in finished]
    if missing:
        raise MissingArtifact(
            f"{stage}: {len(finished)} of {len(run.partitions)} partitions of run {run.config.run_id()} are done; "
            f"missing: {_shortened(missing)}. Run: mixednuts {stage} with the same configuration"
        )
    return finished


def _shortened(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def stage_clock(store: Store, stage: str) -> Iterator[None]:
    """Add the block's wall-clock seconds to those that the stage has already taken in this run."""
    started = time.perf_counter()
    patience = FIRST_ANSWER_SECONDS  # if the stage fails, the storage may be the reason: do not wait for it again
    try:
        yield
        patience = PATIENCE_SECONDS
    finally:
        _add_seconds(Store(store.uri, patience), stage, time.perf_counter() - started)


def _add_seconds(store: Store, stage: str, seconds: float) -> None:
    """A storage that fails here is only logged, so that it does not hide the stage's own error."""
    try:
        known = stage_seconds(store)
        content = {**known, stage: round(known.get(stage, 0.0) + seconds, 3)}
        store.write(_SECONDS, json.dumps(content).encode())
    except StoreError as error:
        logger.warning("the time that the %s stage took is not kept: %s", stage, error)


def stage_seconds(store: Store) -> dict[str, float]:
    """Return the wall-clock seconds of each stage that has begun, summed over all the commands that worked on it."""
    try:
        return {str(stage): float(seconds) for stage, seconds in read_json(store.read(_SECONDS)).items()}
    except MissingArtifact:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s) and counts as 0", store.address(_SECONDS), error)
        return {}


def record_current_stage(store: Store, stage: str, content_hash: str) -> None:
    """Write which rows the driver computes now."""
    store.write(_CURRENT, json.dumps({"stage": stage, "content_hash": content_hash}).encode())


def current_stage(store: Store) -> tuple[str, str] | None:
    """Return the folder and content hash of the last stage that a driver has begun to compute, or None."""
    try:
        found = read_json(store.read(_CURRENT))
        return str(found["stage"]), str(found["content_hash"])
    except (MissingArtifact, ValueError, KeyError, TypeError):
        return None


# --- fingerprints of the stages' files, and the search's result -------------------------------------------------------


def search_fingerprint(opened: Run) -> str:
    """8 hex digits of all that the search's files depend on."""
    values, stage = opened.config.determinants(), criterion_stage(opened.config.search.criterion)
    counted = {stage: values[stage]} if stage else {}
    return digest({"attack": opened.attack_fingerprint, "search": values["search"], **counted})


def evaluate_fingerprint(opened: Run, search: SearchResult) -> str:
    """8 hex digits of all that the evaluate stage's rows depend on, the deployed parameters included."""
    deployed = {"alpha_d": search.surrogate_alpha, **search.deployed().settings()}
    evaluate = opened.config.determinants()["evaluate"]
    points = [done.fingerprint for done in search.rounds]
    cut = {} if opened.searched is opened or not evaluate["warm_start"] else {"first": _last_warm(opened)}
    given = {_POINTS: value} if (value := opened.inputs.checksums.get(_POINTS)) else {}
    return digest(
        {
            "attack": opened.attack_fingerprint, "deployed": deployed, "evaluate": evaluate, "points": points,
            **given, **cut,
        }
    )  # fmt: skip


def _last_warm(opened: Run) -> int:
    """Return the number of images in the partitions that the attack stage computes."""
    size = opened.partition_size
    return -(-(opened.config.search.first or 0) // size) * size


def autoattack_fingerprint(opened: Run) -> str:
    """The same where there is no std and AutoAttack attacks rob alone."""
    keys = ("version", "data", "rob", "threat", "seed", "partition_size", "precision", "evaluate")
    values = opened.config.determinants()
    return digest({**{key: values[key] for key in keys}, "checksums": opened.inputs.checksums})


def read_search_result(opened: Run) -> SearchResult:
    """`search/selected.json`.

    Raises:
        MissingArtifact: where the search has not been run.
        DamagedFile: where the file is not what was written; it is left as it is.
        FingerprintMismatch: where the file is of another run.
    """
    result, fingerprint = stored_search(opened.store)
    if fingerprint != search_fingerprint(opened):
        raise FingerprintMismatch(
            f"{opened.store.address(SELECTED)} has the content hash {fingerprint}, this run has "
            f"{search_fingerprint(opened)}; delete it and search again"
        )
    return result


def stored_search(store: Store) -> tuple[SearchResult, str]:
    """The search's result in a run's folder, and the fingerprint of what it was searched from; errors as above."""
    address = store.address(SELECTED)
    try:
        content = read_json(store.read(SELECTED))
        if content.pop("digest") != digest(content):
            raise ValueError("its content has changed")
        return SearchResult.from_json(content["result"]), content["fingerprint"]
    except MissingArtifact as error:
        raise MissingArtifact(
            f"the run has not been searched yet: {address} does not exist. Run: mixednuts search with the same "
            "configuration, or mixednuts run for all that is missing"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{address} is damaged ({error}): `mixednuts search` sets it aside and searches again"
        raise DamagedFile(message, address) from error
