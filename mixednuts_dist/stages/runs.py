"""Open a run, and list its finished partitions; `run.yaml` in its folder identifies it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from ..config.config_file import read_yaml
from ..config.run_config import RESULTS_VERSION, RUN, RUNS, RunConfig, digest, parse_config
from ..config.uris import needs_trust
from ..errors import ConfigError, ContentHashMismatch, DamagedFile, MissingArtifact
from ..storage.code_files import keep_code, places
from ..storage.index import finished_files
from ..storage.outages import FIRST_ANSWER_SECONDS, PATIENCE_SECONDS
from ..storage.partitions import Partition, Sample, partition_size_of, split_images
from ..storage.records import PartitionSummary, from_plain
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
    def sample(self) -> Sample | None:
        """The images that the search reads, `search.sample` of the first `search.first` images; None for all."""
        search, n_images = self.config.search, self.inputs.n_images
        asked = min(MOST_IMAGES, MOST_LOGITS // self.inputs.n_classes) if search.sample == "auto" else search.sample
        n_first = min(search.first or n_images, n_images)
        return None if asked >= n_images == n_first else Sample(n_first, min(asked, n_first), self.config.seed)

    @property
    def sample_ids(self) -> Tensor | None:
        """The ascending ids of the images that the search reads; None for all images."""
        return None if self.sample is None else self.sample.ids()

    @property
    def partition_size(self) -> int:
        """The number of images per partition."""
        return partition_size_of(self.inputs.n_images, self.config.partition_size)

    @property
    def attack_content_hash(self) -> str:
        """8 hex digits of everything that determines the attack stage's rows, including weights and images."""
        return digest({**self.config.attack_determinants(), "checksums": self.inputs.checksums})


@dataclass(frozen=True)
class RunFile:
    """The content of `run.yaml`."""

    version: int
    run_id: str
    attack_content_hash: str
    inputs: Inputs
    config: dict[str, Any]
    folder: str  # the folder of the configuration
    code: dict[str, str]  # from `keep_code`
    versions: dict[str, str]  # the last key, which must be there, because a truncated file is often valid YAML

    @classmethod
    def parse(cls, content: bytes, address: str) -> RunFile:
        """Return the description in the bytes of a file.

        Raises:
            DamagedFile: if the file has changed since it was written.
            ConfigError: if another version of this package wrote it.
        """
        try:
            found = read_yaml(content.decode(), RUN)
            versions = found["versions"]
            if found.get("version") == RESULTS_VERSION:
                return from_plain(cls, found)
        except (ValueError, LookupError, TypeError, AttributeError, ConfigError) as error:
            message = f"{address} is damaged ({error}); the next `mixednuts run` writes it again"
            raise DamagedFile(message, address, content) from error
        release = versions.get("mixednuts-dist", "unknown") if isinstance(versions, dict) else "unknown"
        raise ConfigError(
            f"{address} was written by release {release}, whose runs this release does not read. Run its configuration "
            "again, or install that release"
        )


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
        return Run(config, store, RunFile.parse(store.read(RUN), store.address(RUN)).inputs)
    except MissingArtifact:
        raise MissingArtifact(
            f"run {config.run_id()} has not begun under {config.storage}. Run: mixednuts attack"
        ) from None


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
    if not trusted and (extensions := described.config.get("extensions")):
        raise ConfigError(needs_trust(store.uri, {"extensions": str(extensions)}))
    run = run_of(store, described)
    if not trusted and (outside := run.config.outside_of_stages()):
        raise ConfigError(needs_trust(store.uri, outside))
    run.config._trusted = trusted
    return run


def described_run(store: Store) -> RunFile:
    """Return the content of `run.yaml`; errors as in `RunFile.parse`. MissingArtifact names runs in the subfolders."""
    try:
        return RunFile.parse(store.read(RUN), store.address(RUN))
    except MissingArtifact:
        runs = [name for name in store.names("") if store.exists(f"{name}/{RUN}")][:5]
        hint = f"; these folders below it do: {', '.join(runs)}" if runs else ""
        raise MissingArtifact(
            f"{store.uri} holds no run (no {RUN}){hint}. Give the folder <storage>/<name>/runs/<run id>"
        ) from None


def run_of(store: Store, described: RunFile) -> Run:
    """Return the run that `run.yaml` describes; this imports its extensions."""
    folder, find = described.folder, places(store, described.code, described.folder)
    return Run(parse_config(described.config, store.address(RUN), folder=folder, find=find), store, described.inputs)


def run_store(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Store:
    """Return the store of a run's own files, `<storage>/<name>/runs/<run id>`."""
    return Store(config.storage, patience_seconds).child(config.place())


def _write_or_compare(store: Store, run: Run) -> None:
    """Write `run.yaml`, or compare the inputs with those in the existing file; a damaged file is replaced.

    Raises:
        ContentHashMismatch: if the inputs have changed.
    """
    described = RunFile(
        version=RESULTS_VERSION,
        run_id=run.config.run_id(),
        attack_content_hash=run.attack_content_hash,
        inputs=run.inputs,
        config=run.config.model_dump(mode="json"),
        folder=run.config.folder,
        code=keep_code(run.store, run.config.code_files()),
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _VERSIONED},
        },
    )
    content = yaml.safe_dump(asdict(described), sort_keys=False).encode()
    if store.create(RUN, content):
        return
    try:
        stored = RunFile.parse(store.read(RUN), store.address(RUN)).inputs
    except DamagedFile as error:
        logger.warning("%s", error)
        store.set_aside(RUN, error.sha256)
        store.create(RUN, content)
        return
    if stored != run.inputs:
        was, now = stored.checksums, run.inputs.checksums
        changed = [key for key, value in now.items() if was.get(key) != value]
        what = ", ".join(f"{key} was {was.get(key, '?')[:12]} and is {now[key][:12]}" for key in changed)
        raise ContentHashMismatch(
            f"the inputs of run {run.config.run_id()} have changed since it began ({what or 'images'}): "
            f"its stored rows belong to other inputs. Give the run another name, or delete {run.store.uri}"
        )


def finished_partitions(run: Run, stage: str, content_hash: str) -> dict[Partition, PartitionSummary]:
    """Return the partitions whose file is complete; a damaged file counts as missing."""
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
