"""Open a run, and list its finished partitions; `run.yaml` in its folder identifies it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from ..config.run_config import RESULTS_VERSION, RUNS, RunConfig, digest, parse_config
from ..config.uris import needs_trust
from ..errors import ConfigError, ContentHashMismatch, DamagedFile, MissingArtifact
from ..storage.code_files import keep_code, places
from ..storage.index import finished_files
from ..storage.outages import FIRST_ANSWER_SECONDS, PATIENCE_SECONDS
from ..storage.partitions import Partition, Sample, partition_size_of, split_images
from ..storage.records import PartitionSummary
from ..storage.run_file import LAST_KEY, RUN, parse_run_file
from ..storage.store import Store
from ..storage.tables import read_columns
from .run_inputs import Inputs, inspect_inputs

if TYPE_CHECKING:  # `status` works without PyTorch
    from torch import Tensor

logger = logging.getLogger(__name__)

# The limits of the sample that the search reads, so that the driver needs less than 2 GB for all copies of it.
MOST_LOGITS, MOST_IMAGES = 5_000_000, 50_000
RESULTS = "report/results.json"  # written last, when the report is complete
_VERSIONED = ("mixednuts-dist", "torch", "ray", "pyautoattack", "numpy", "pyarrow")


@dataclass(frozen=True)
class Run:
    """An opened run."""

    config: RunConfig
    store: Store  # for the run's own files, `<storage>/<name>/runs/<run id>`
    inputs: Inputs
    first: int | None = None  # only the partitions that hold the first `first` images count; None for all

    @functools.cached_property
    def rows(self) -> Store:
        """The store of the rows that runs of one name share, `<storage>/<name>`.

        They lie next to the run's folder or, if that folder was copied elsewhere, in the configured storage.
        """
        above, _, runs = self.store.uri.rstrip("/").rpartition("/")[0].rpartition("/")
        return self.store.at(above) if runs == RUNS else Store(self.config.storage).child(self.config.name)

    @functools.cached_property
    def partitions(self) -> list[Partition]:
        n_images = self.inputs.n_images
        every = split_images(n_images, self.partition_size)
        return [part for part in every if part.start < (self.first or n_images)]

    @property
    def n_images(self) -> int:
        """The number of images in the partitions that count."""
        return sum(map(len, self.partitions))

    def columns(
        self, stage: str, content_hash: str, names: Sequence[str], sample_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return columns of a stage's rows in the partitions that count; arguments and errors as in `read_columns`."""
        return read_columns(self.rows, stage, self.partitions, content_hash, names, sample_ids=sample_ids)

    @functools.cached_property
    def searched(self) -> Run:
        """The run cut to the whole partitions that hold the images of `search.first`."""
        first = self.config.search.first
        return self if first is None or first >= self.n_images else replace(self, first=first)

    @property
    def partition_size(self) -> int:
        """The number of images per partition."""
        return partition_size_of(self.inputs.n_images, self.config.partition_size)

    @property
    def attack_content_hash(self) -> str:
        """8 hex digits of everything that determines the attack stage's rows, including weights and images."""
        return digest({**self.config.attack_determinants(), "checksums": self.inputs.checksums})


def open_run(config: RunConfig) -> Run:
    """Inspect the inputs, and write `run.yaml` or compare the inputs with those in it.

    If the storage does not respond or cannot be written, an error is raised before images and classifiers are loaded.

    Raises:
        DatasetError, BaseClassifierError, ConfigError: if the inputs cannot be used.
        ContentHashMismatch: if the weights or images have changed since the run began.
        StoreError: if the storage does not respond, or (ReadOnlyStorage) cannot be written.
    """
    config.check_sources()
    impatient = run_store(config, FIRST_ANSWER_SECONDS)
    impatient.exists(RUN)  # raises for a wrong address or key
    impatient.require_writable()
    run = Run(config, run_store(config), inspect_inputs(config))
    _write_or_compare(impatient, run)
    for opened in (run.rows, run.store):
        opened.sweep()
    return run


def reopen_run(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Run:
    """Return a run that an earlier stage has opened, without loading a classifier.

    Raises:
        MissingArtifact: if no stage has opened it.
    """
    store = run_store(config, patience_seconds)
    try:
        described = parse_run_file(store.read(RUN), store.address(RUN))
    except MissingArtifact:
        raise MissingArtifact(
            f"run {config.run_id()} has not begun under {config.storage}. Run: mixednuts attack"
        ) from None
    return Run(config, store, _inputs_in(described, store.address(RUN)))


def stored_run(store: Store, *, trusted: bool = False) -> Run:
    """Return the run in a folder, without its configuration file.

    Args:
        trusted: whether to import the extensions of the run and to read the files that its stages name. Otherwise,
            a run that has extensions or names files raises ConfigError.

    Raises:
        MissingArtifact: if the folder holds no run.
        DamagedFile: if `run.yaml` has changed since it was written.
        ConfigError: for a configuration that this release does not read, a missing extension, or a run that is not
            trusted and needs to be.
    """
    described = described_run(store)
    content = described["config"]
    if not trusted and isinstance(content, dict) and content.get("extensions"):
        raise ConfigError(needs_trust(store.uri, {"extensions": str(content["extensions"])}))
    run = run_of(store, described)
    if not trusted and (outside := run.config.outside_of_stages()):
        raise ConfigError(needs_trust(store.uri, outside))
    run.config._trusted = trusted
    return run


def described_run(store: Store) -> dict[str, Any]:
    """Return the content of `run.yaml`; errors as in `parse_run_file`. MissingArtifact names runs in the subfolders."""
    try:
        return parse_run_file(store.read(RUN), store.address(RUN))
    except MissingArtifact:
        runs = [name for name in store.names("") if store.exists(f"{name}/{RUN}")][:5]
        hint = f"; these folders below it do: {', '.join(runs)}" if runs else ""
        raise MissingArtifact(
            f"{store.uri} holds no run (no {RUN}){hint}. Give the folder <storage>/<name>/runs/<run id>"
        ) from None


def run_of(store: Store, described: Mapping[str, Any]) -> Run:
    """Return the run that `run.yaml` describes; this imports its extensions."""
    address, folder = store.address(RUN), described.get("folder") or ""
    inputs = _inputs_in(described, address)
    config = parse_config(described["config"], address, folder=folder, find=places(store, described))
    return Run(config, store, inputs)


def run_store(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Store:
    """Return the store of a run's own files, `<storage>/<name>/runs/<run id>`."""
    return Store(config.storage, patience_seconds).child(config.place())


def _write_or_compare(store: Store, run: Run) -> None:
    """Write `run.yaml`, or compare the inputs with those in the existing file; a damaged file is replaced."""
    content = yaml.safe_dump(
        {
            "version": RESULTS_VERSION,
            "run_id": run.config.run_id(),
            "attack_content_hash": run.attack_content_hash,
            "inputs": {**asdict(run.inputs), "image_shape": list(run.inputs.image_shape)},
            "config": run.config.model_dump(mode="json"),
            "folder": run.config.folder,
            "code": keep_code(run.store, run.config.code_files()),
            LAST_KEY: {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in _VERSIONED},
            },
        },
        sort_keys=False,
    ).encode()
    if store.create(RUN, content):
        return
    existing, address = store.read(RUN), store.address(RUN)
    try:
        _require_same_inputs(run, _inputs_in(parse_run_file(existing, address), address))
    except DamagedFile as error:
        logger.warning("%s", error)
        store.set_aside(RUN, hashlib.sha256(existing).hexdigest())
        store.create(RUN, content)


def _require_same_inputs(run: Run, stored: Inputs) -> None:
    if stored != run.inputs:
        was, now = stored.checksums, run.inputs.checksums
        changed = [key for key, value in now.items() if was.get(key) != value]
        what = ", ".join(f"{key} was {was.get(key, '?')[:12]} and is {now[key][:12]}" for key in changed)
        raise ContentHashMismatch(
            f"the inputs of run {run.config.run_id()} have changed since it began ({what or 'images'}): "
            f"its stored rows belong to other inputs. Give the run another name, or delete {run.store.uri}"
        )


def _inputs_in(described: Mapping[str, Any], address: str) -> Inputs:
    try:
        inputs = described["inputs"]
        return Inputs(**{**inputs, "image_shape": tuple(inputs["image_shape"])})
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"{address} is damaged ({error}); the next `mixednuts run` writes it again", address
        ) from error


def searched_images(run: Run) -> Tensor | None:
    """Return the ascending ids of the images that the search reads; None for all images."""
    sample = search_sample(run)
    return None if sample is None else sample.ids()


def search_sample(run: Run) -> Sample | None:
    """Return the sample that the search reads, `search.sample` of the first `search.first` images; None for all."""
    search, n_images = run.config.search, run.inputs.n_images
    asked = min(MOST_IMAGES, MOST_LOGITS // run.inputs.n_classes) if search.sample == "auto" else search.sample
    n_first = min(search.first or n_images, n_images)
    return None if asked >= n_images == n_first else Sample(n_first, min(asked, n_first), run.config.seed)


def finished_partitions(run: Run, stage: str, content_hash: str) -> dict[Partition, PartitionSummary]:
    """Return the partitions whose file is complete; a damaged file counts as missing.

    Raises:
        ContentHashMismatch: if a file belongs to another run.
    """
    return finished_files(run.rows, stage, run.partitions, content_hash)


def require_complete(run: Run, stage: str, content_hash: str) -> dict[Partition, PartitionSummary]:
    """Return the summaries of all partitions of a finished stage.

    Raises:
        MissingArtifact: with the number of finished partitions, the missing ones, and the command that computes them.
    """
    finished = finished_partitions(run, stage, content_hash)
    missing = [str(partition.index) for partition in run.partitions if partition not in finished]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise MissingArtifact(
            f"{stage}: {len(finished)} of {len(run.partitions)} partitions of run {run.config.run_id()} are done; "
            f"missing: {', '.join(missing[:10])}{more}. Run: mixednuts {stage} with the same configuration"
        )
    return finished
