"""The worker, which has an accelerator or some cores, and computes the files of partitions.

The worker is a plain class, so that it can run and be debugged without a cluster. `ray_executor.py` makes an actor of
it.

Shapes: B images of a partition, K classes.
"""

import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.gradient_model import AttackedModel
from ..classifiers.base_classifiers import classifier_checksum, load_classifier
from ..config.register import require_extensions
from ..config.run_config import RUN
from ..config.uris import ClassifierSource, travelled
from ..errors import BaseClassifierError, ClusterError, DatasetError, StoreError
from ..images.datasets import Dataset, labels_checksum, open_dataset
from ..storage.partitions import Partition, rows_folder
from ..storage.records import PartitionSummary
from ..storage.store import Store
from ..storage.tables import create_whole, encode_table, finished_rows
from .gpus import keep_to_share, unusable_gpu
from .output_checks import OutputChecks
from .tasks import Task
from .workbench import Workbench, device_type
from .worker_spec import PassSeconds, Place, WorkerSpec

logger = logging.getLogger(__name__)

_TIMED_IMAGES = 256  # at most, to measure how long a pass takes
_PROBED_IMAGES = 4  # per pass, to measure roughly how long a pass takes


class AttackWorker:
    """Loads the base classifiers once and then attacks one partition after the other.

    Args:
        n_gpus: the number or share of GPUs that it may use; 0 for the CPU.
    """

    def __init__(self, spec: WorkerSpec, n_gpus: float = 0.0) -> None:
        # Nothing here may fail: an exception in an actor's constructor looks like a lost machine.
        self.spec, self._n_gpus, self._pass_seconds = spec, n_gpus, 0.0

    def locate(self) -> Place:
        """Return where the worker runs. The pool calls this method before any other that may fail."""
        return Place(platform.node(), os.environ.get("CUDA_VISIBLE_DEVICES", "") if self._n_gpus else "")

    def ready(self) -> float:
        """Load everything, unless that is done; returns about how many seconds a forward pass takes per image.

        Raises:
            ClusterError: if torch cannot use the worker's GPU.
            ConfigError, BaseClassifierError, DatasetError: if this machine has other extensions, weights or images
                than the driver.
            StoreError: if this machine does not see the driver's storage.
        """
        if self._pass_seconds:
            return self._pass_seconds
        if self._n_gpus and not torch.cuda.is_available():
            raise ClusterError(unusable_gpu())
        keep_to_share(self._n_gpus)
        torch.set_num_threads(self.spec.n_threads)
        require_extensions(self.spec.extensions, travelled(self.spec.working_folder))
        self.spec = self.spec.here()
        self.device = torch.device("cuda" if self._n_gpus else "cpu")
        self.dataset = self._dataset()
        networks = {role: self._classifier(source, role) for role, source in self.spec.classifiers.items()}
        self.store = Store(self.spec.store_uri)
        run = Store(self.spec.run_uri)
        if networks and not run.exists(RUN):
            raise StoreError(
                f"{platform.node()} does not see {run.address(RUN)}, which the driver wrote: "
                "give a storage that every node reaches, s3://bucket/prefix or a shared folder"
            )
        self.bench = Workbench(self.spec, networks, self.store, self.dataset, self.device)
        self.checks = OutputChecks(self.bench)
        self._pass_seconds = self._time_a_pass(networks)
        return self._pass_seconds

    def _time_a_pass(self, networks: Mapping[str, nn.Module]) -> float:
        """Return the seconds per image of a small pass through all networks, after one as a warm-up."""
        if not networks:
            return math.inf
        x, _ = self.dataset.read(0, min(2 * _PROBED_IMAGES, len(self.dataset)))
        for part in torch.split(x.to(self.device), _PROBED_IMAGES):
            started = time.perf_counter()
            with torch.no_grad():
                for network in networks.values():
                    network(part).sum().item()  # `item` waits for the device
        return (time.perf_counter() - started) / len(part)

    def _dataset(self) -> Dataset:
        dataset = open_dataset(self.spec.data)
        if labels_checksum(dataset) != self.spec.checksums["labels"]:
            raise DatasetError(
                f"{self.spec.data} on {platform.node()} holds {len(dataset)} images, and their labels are not "
                "those that the driver saw: copy the same files to every node, or give all of them one place with: "
                "mixednuts prepare URI --to s3://bucket/prefix"
            )
        return dataset

    def _classifier(self, source: ClassifierSource, role: str) -> nn.Module:
        model = load_classifier(source, role)
        found, expected = classifier_checksum(model, source), self.spec.checksums[role]
        if found != expected:
            raise BaseClassifierError(
                f"{role}={source!r} on {platform.node()} has checksum {found[:12]}, the run has {expected[:12]}: "
                "this machine holds other weights; copy the same files to every node"
            )
        return model.to(self.device)

    def process(self, partition: Partition, task: Task, prefetched: Sequence[Partition] = ()) -> PartitionSummary:
        """Compute one partition and write its file, unless another driver's worker has; returns the file's summary.

        Args:
            prefetched: the partitions that this worker gets next: their images take the slots that become free.
        """
        written: PartitionSummary | None = task.write(self.dataset, partition)
        if written is not None:
            return written
        folder = rows_folder(task.stage, task.content_hash)
        path, started = f"{folder}/{partition.file_name}", time.perf_counter()
        if there := finished_rows(self.store, path, task.content_hash, partition):
            return there
        with self.bench.at(partition, folder, task.mixture, prefetched):
            x, y = self.bench.images(partition)
            with self.checks.checked(x) as require_usable:
                columns, counts = task.compute(self.bench, partition)
                require_usable(columns)
        on_gpu = self.device.type == "cuda"
        summary = PartitionSummary(
            stage=task.stage, partition=partition.index, start=partition.start, stop=partition.stop,
            seconds=time.perf_counter() - started, finished=time.time(),
            node=platform.node(), device=device_type(self.device),
            n_devices=self._n_gpus if on_gpu else float(self.spec.n_threads), **self.bench.settings(x), **counts,
        )  # fmt: skip
        ids = torch.arange(partition.start, partition.stop)
        content = encode_table({"sample_id": ids, "label": y, **columns}, task.content_hash, summary)
        summary = replace(summary, n_bytes=len(content))
        if there := create_whole(self.store, path, content, task.content_hash, partition):
            return there
        logger.info("%s written", path, extra={"run": self.spec.run_id, **asdict(summary)})
        return summary

    def time_passes(self) -> dict[str, PassSeconds]:
        """Return the seconds per pass of each classifier, in the run's precisions and batch shape.

        The passes go through the fast copies, as nearly all passes of a run do. If there are two classifiers, the time
        of their mixed classifier ("mixed") is the sum of both.
        """
        x, _ = self.dataset.read(0, min(_TIMED_IMAGES, len(self.dataset)))
        x = x.to(self.device)
        x, found = x[: self.bench.shape(x).rows], {}  # `shape` also decides the precisions
        for name, network in self.bench.networks.items():
            fast = AttackedModel.of(network, copies=self.bench.copies, like_BCHW=x, rows=len(x)).fast
            forward, both = _seconds(partial(fast.evaluate, x, None), x), _seconds(partial(fast.probe, x), x)
            found[name] = PassSeconds(forward / len(x), both / len(x))
        if "std" in found:
            std, rob = found["std"], found["rob"]
            found["mixed"] = PassSeconds(std.forward + rob.forward, std.both + rob.both)
        return found


def _seconds(act: Callable[[], Any], x_BCHW: Tensor) -> float:
    """Return the mean seconds of up to 20 calls in about a second, after one call as a warm-up."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if x_BCHW.is_cuda else lambda: None
    act()
    synchronize()
    started, n_calls = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < 1.0 and n_calls < 20:
        act()
        synchronize()
        n_calls += 1
    return taken / n_calls
