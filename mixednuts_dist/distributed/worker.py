"""One worker: it owns an accelerator (or its share of the cores) and turns partitions into files.

A plain class, so that it can be run and debugged without a cluster; `ray_executor.py` makes an actor of it.

Shapes: B images of a partition, K classes.
"""

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.precision import FastCopies
from ..acceleration.tf32 import tf32_allowed
from ..attacks.gradient_model import AttackedModel
from ..classifiers.base_classifiers import classifier_checksum, copied, load_classifier
from ..config.register import require_extensions
from ..config.uris import travelled
from ..errors import BaseClassifierError, ClusterError, DatasetError, StoreError
from ..images.datasets import Dataset, labels_checksum, open_dataset
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LogitTransform
from ..norms.random import key_number
from ..storage.damage import create_whole
from ..storage.index import with_checksum
from ..storage.partitions import Partition, rows_folder
from ..storage.records import Receipt
from ..storage.run_file import RUN
from ..storage.store import Store
from ..storage.tables import encode_table, finished_receipt
from .answers import Answers
from .gpus import keep_to_share, unusable_gpu
from .tasks import Task
from .workbench import Workbench
from .worker_spec import Place, WorkerSpec

logger = logging.getLogger(__name__)

_MOST_UNWRITTEN = 2  # files that wait for a storage that does not answer while the next partition is attacked
_WRITE_SECONDS = 1.0  # a file is waited for this long before the next partition begins
_BEGIN_AT_ONCE, _BEGIN_A_SECOND = 32, 10.0  # workers that load
_TIMED_IMAGES = 256  # at most, to measure how long a pass takes
_ENOUGH_SECONDS = 1.0  # of repeats, likewise


@dataclass(frozen=True)
class PassSeconds:
    """Seconds an image, in a full batch."""

    forward: float
    both: float  # forward and backward

    def of(self, n_forward: int, n_backward: int) -> float:
        """Seconds that an image takes with so many passes, each backward one with its forward one."""
        return (n_forward - n_backward) * self.forward + n_backward * self.both


def time_classifiers(networks: Mapping[str, nn.Module], x_BCHW: Tensor, copies: FastCopies) -> dict[str, PassSeconds]:
    """The base classifiers and, of "std" and "rob", their mixture, whose parameters do not change its cost.

    Through the copies that attacks go through: nearly all passes of a run are theirs.
    """
    models = dict(networks)
    if "std" in networks:
        mixed = MixedClassifier(networks["std"], networks["rob"], LogitTransform(1.0, 1.0, 0.0), 0.9).eval()
        models["mixed"] = mixed.to(x_BCHW.device)
    return {
        name: _time(AttackedModel.of(model, copies=copies, like_BCHW=x_BCHW, rows=len(x_BCHW)), x_BCHW)
        for name, model in models.items()
    }


def _time(attacked: AttackedModel, x_BCHW: Tensor) -> PassSeconds:
    def forward() -> None:
        with torch.no_grad(), tf32_allowed(attacked.fast.tf32):
            attacked.fast.run(x_BCHW).model_logits  # noqa: B018, it is computed as it is asked for

    def both() -> None:
        attacked.fast.probe(x_BCHW)

    return PassSeconds(_seconds(forward, x_BCHW) / len(x_BCHW), _seconds(both, x_BCHW) / len(x_BCHW))


def _seconds(act: Callable[[], Any], x_BCHW: Tensor) -> float:
    """Median of repeats, after one that warms up."""
    times: list[float] = []
    act()
    while sum(times) < _ENOUGH_SECONDS and len(times) < 20:
        _synchronise(x_BCHW)
        started = time.perf_counter()
        act()
        _synchronise(x_BCHW)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def _synchronise(x_BCHW: Tensor) -> None:
    if x_BCHW.is_cuda:
        torch.cuda.synchronize(x_BCHW.device)


def load_delay(n_workers: int, key: str) -> float:
    """Seconds that a worker waits before it loads: of hundreds that start at once, about ten begin in each second.

    Together they would read the same weights from one shared storage at the same time. A few begin at once.

    Example:
        >>> load_delay(32, "node-1/7"), 0 < load_delay(512, "node-1/7") < 48
        (0.0, True)
    """
    return max(0, n_workers - _BEGIN_AT_ONCE) / _BEGIN_A_SECOND * (key_number(key) / 2**63)


class AttackWorker:
    """Loads the base classifiers once and then attacks one partition after the other.

    Args:
        n_gpus: the GPUs or the share of one that it may use; it computes on the CPU where that is 0.
    """

    def __init__(self, spec: WorkerSpec, n_gpus: float = 0.0) -> None:
        # Nothing here may fail: an exception in an actor's constructor cannot be told from a lost machine.
        self.spec, self._n_gpus, self._is_ready = spec, n_gpus, False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._unwritten: dict[Partition, Future[Receipt]] = {}  # in the order in which they were computed
        self._unbilled = 0.0  # seconds of work on partitions that are not finished

    def locate(self) -> Place:
        """Return where it runs, before anything that may fail."""
        return Place(platform.node(), os.environ.get("CUDA_VISIBLE_DEVICES", "") if self._n_gpus else "")

    def ready(self) -> str:
        """Load everything, unless that is done; returns the type of its device.

        Raises:
            ClusterError: where it is given a GPU that torch cannot use.
            ConfigError: where this machine's extensions are not the driver's.
            BaseClassifierError: where this machine's weights are not the ones that the driver saw.
            DatasetError: where its images are not.
            StoreError: where this machine does not see the driver's storage.
        """
        if self._is_ready:
            return self._device_type()
        if self._n_gpus and not torch.cuda.is_available():
            raise ClusterError(unusable_gpu())
        keep_to_share(self._n_gpus)
        torch.set_num_threads(self.spec.n_threads)
        require_extensions(self.spec.extensions, travelled(self.spec.working_folder))
        self.device = torch.device("cuda" if self._n_gpus else "cpu")
        time.sleep(load_delay(self.spec.n_workers, f"{self.spec.run_id}/{platform.node()}/{os.getpid()}"))
        self.dataset = self._dataset()
        networks = {role: self._classifier(uri, role) for role, uri in self.spec.uris.items()}
        self.store = Store(self.spec.store_uri)
        run_file = f"{self.spec.run}/{RUN}".lstrip("/")
        if self.spec.rob_uri is not None and not self.store.exists(run_file):
            self.store.require_bucket()
            raise StoreError(
                f"{platform.node()} does not see {self.store.address(run_file)}, which the driver wrote: "
                "give a storage that every node reaches, s3://bucket/prefix or a shared folder"
            )
        self.bench = Workbench(self.spec, networks, self.store, self.dataset, self.device)
        self.answers = Answers(
            networks, self.spec.uris, self.spec.n_classes, self.bench.logits, random=self.spec.random
        )
        self._is_ready = True
        return self._device_type()

    def _device_type(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def _dataset(self) -> Dataset:
        given = self.spec.objects.get("data")
        dataset: Dataset = given if given is not None else open_dataset(self.spec.placed(self.spec.data_uri))
        if labels_checksum(dataset) != self.spec.checksums["labels"]:
            raise DatasetError(
                f"{self.spec.data_uri} on {platform.node()} holds {len(dataset)} images, and their labels are not "
                "those that the driver saw: copy the same files to every node, or give all of them one place with: "
                "mixednuts prepare URI --to s3://bucket/prefix"
            )
        return dataset

    def _classifier(self, uri: str, role: str) -> nn.Module:
        given = self.spec.objects.get(role)
        model = load_classifier(uri, role) if given is None else copied(given)
        found, expected = classifier_checksum(model, uri), self.spec.checksums[role]
        if found != expected:
            raise BaseClassifierError(
                f"{role}={uri!r} on {platform.node()} has checksum {found[:12]}, the run has {expected[:12]}: "
                "this machine holds other weights; copy the same files to every node"
            )
        return model.to(self.device)

    def measure(self, partition: Partition) -> dict[str, Any]:
        """Return the rows per pass and the precisions that suit this type of device, found on a partition's images."""
        x, _ = self.bench.images(partition)
        with self.answers.checked(x):
            return self.bench.measured(x)

    def process(
        self,
        partition: Partition,
        task: Task,
        prefetched: Sequence[Partition] = (),
        measured: Mapping[str, Any] | None = None,
    ) -> dict[Partition, Receipt]:
        """Compute one partition, unless another driver's worker has; returns what was written since the last call.

        While the storage does not answer, up to `_MOST_UNWRITTEN` files wait for it and the attacks continue.

        Args:
            prefetched: the partitions that this worker gets next: their images take the slots that become free.
            measured: what `measure` has returned on a device of this type; measured here if missing.
        """
        if (written := task.write(self.dataset, partition)) is not None:
            return {partition: written}
        folder = rows_folder(task.stage, task.fingerprint)
        path, started = f"{folder}/{partition.file_name}", time.perf_counter()
        if measured is not None:
            self.bench.use(measured)
        if not self._unwritten and (there := finished_receipt(self.store, path, task.fingerprint)):
            return {partition: there}
        with self.bench.at(partition, task.stage, task.fingerprint, mixture=task.mixture, prefetched=prefetched):
            x, y = self.bench.images(partition)
            with self.answers.checked(x) as require_usable:
                columns, summary = task.compute(self.bench, partition)
                require_usable(columns)
        receipt = Receipt(
            stage=task.stage, partition=partition.index, start=partition.start, stop=partition.stop,
            seconds=self._seconds_of(time.perf_counter() - started, summary["n_forward"]), finished=time.time(),
            node=platform.node(), precision=self.bench.precisions(x), rows=self.bench.shape(x).rows,
            float32_rows=self.bench.shape(x).float32.rows, repeatable=self.bench.repeatable(x),
            **self._held(), **summary,
        )  # fmt: skip
        ids = torch.arange(partition.start, partition.stop)
        content = encode_table({"sample_id": ids, "label": y, **columns}, task.fingerprint, receipt)
        self._unwritten[partition] = self._writer.submit(self._write, path, content, receipt, task)
        wait(self._unwritten.values(), timeout=_WRITE_SECONDS)
        wait([*self._unwritten.values()][:-_MOST_UNWRITTEN])
        return self._written()

    def _seconds_of(self, seconds: float, n_forward: int) -> float:
        """Return the partition's part of the time since the last call, by its part of the passes on all begun ones."""
        n_begun = self.bench.n_forward_begun
        part = n_forward / (n_forward + n_begun) if n_begun else 1.0
        own = part * (self._unbilled + seconds)
        self._unbilled += seconds - own
        return own

    def flush(self) -> dict[Partition, Receipt]:
        """Wait for the files that are not written yet; returns their receipts."""
        wait(self._unwritten.values())
        return self._written()

    def _written(self) -> dict[Partition, Receipt]:
        written = {partition: future for partition, future in self._unwritten.items() if future.done()}
        for partition in written:
            del self._unwritten[partition]
        return {partition: future.result() for partition, future in written.items()}

    def _write(self, path: str, content: bytes, receipt: Receipt, task: Task) -> Receipt:
        """The receipt of the file that is there in the end: ours, or one that another driver's worker has left."""
        receipt = with_checksum(receipt, content)
        if there := create_whole(self.store, path, content, task.fingerprint):
            return there
        logger.info("%s written", path, extra={"run": self.spec.run_id, **asdict(receipt)})
        return receipt

    def time_passes(self) -> dict[str, PassSeconds]:
        """Seconds an image and pass of each network and their mixture, in the run's precisions and batch shape."""
        x, _ = self.dataset.read(0, min(_TIMED_IMAGES, len(self.dataset)))
        x = x.to(self.device)
        rows = self.bench.shape(x).rows  # decides the precisions too
        return time_classifiers(self.bench.networks, x[:rows], self.bench.copies)

    def _held(self) -> dict[str, Any]:
        """What the worker computes on, for the bill: one accelerator's name and share, or its cores."""
        held = self._n_gpus if self.device.type == "cuda" else float(self.spec.n_threads)
        return {"device": self._device_type(), "n_devices": held}
