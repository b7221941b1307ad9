"""The tools of a stage on one worker: the run's classifiers on its device, its images, and stored rows.

A stage's `compute(worker, partition)` gets a `Workbench`. When slots of a batch become free during a partition's last
attacks, they take images of prefetched partitions, which the worker gets next. Each attacked network therefore has one
engine (a `Scheduler`), which continues from partition to partition. Prefetching does not change any row, because the
result of an image does not depend on the other images in its batch.

Shapes: B images of a partition, C x H x W, K classes.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..acceleration.batch_shape import BatchShape
from ..acceleration.precision import FastCopies, Precision
from ..attacks.budget import AttackBudget
from ..attacks.gradient_model import measured_rows, repeats_its_bits
from ..attacks.result import AttackResult
from ..attacks.scheduler import Group, Scheduler, partial_results
from ..attacks.verification import Verifier
from ..errors import MissingArtifact
from ..images.datasets import Dataset
from ..mixing.classifier import MixedClassifier
from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform
from ..storage.damage import read_signed_json, signed_json
from ..storage.partitions import Partition
from ..storage.store import Store
from ..storage.tables import read_columns
from .schedule import PREFETCHED
from .worker_spec import WorkerSpec


@dataclass(frozen=True)
class DeviceSettings:
    """How workers compute on a type of device."""

    rows: int  # images per pass
    float32_rows: int
    precision: Mapping[str, Precision]  # "rob" and "std" -> the precision of gradients
    repeatable: bool  # two passes over the same images give the same bits; otherwise only verified results repeat


class Workbench:
    """The tools of one worker for all partitions of all its tasks.

    Args:
        networks: "rob" and, if the run has two classifiers, "std", on the device.
    """

    _decided: DeviceSettings
    model: nn.Module  # the task's mixed classifier, or the robust classifier if the task has none
    model_name: Literal["mixed", "rob"]  # the name of `model` in summaries and columns

    def __init__(
        self, spec: WorkerSpec, networks: Mapping[str, nn.Module], store: Store, dataset: Dataset, device: torch.device
    ) -> None:
        self.spec, self.networks, self.store, self.device = spec, networks, store, device
        self.copies = FastCopies(spec.precision, compile=spec.compile)
        self._dataset = dataset
        self._read: dict[Partition, tuple[Tensor, Tensor]] = {}  # images of the current and the prefetched partitions
        self._shape: BatchShape | None = None
        self._rows = ""  # the folder of the current task's rows
        self._engines: dict[str, Scheduler] = {}  # the current task's, by the name of the attacked network
        self._prefetched: Sequence[Partition] = ()

    @property
    def std(self) -> nn.Module:
        """Return the standard classifier on the device; KeyError in a run without one."""
        return self.networks["std"]

    @property
    def rob(self) -> nn.Module:
        """Return the robust classifier on the device."""
        return self.networks["rob"]

    def images(self, partition: Partition) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) in [0, 1] and labels (B,), on the device."""
        if partition not in self._read:
            x, y = self._dataset.read(partition.start, partition.stop)
            self._read[partition] = x.to(self.device), y.to(self.device)
        return self._read[partition]

    def stored(self, partition: Partition, stage: str, content_hash: str, column: str) -> Tensor:
        """Return a column of another stage's file, on the device; errors as in `read_columns`."""
        return read_columns(self.store, stage, [partition], content_hash, [column])[column].to(self.device)

    def mixed(self, mixture: Mixture) -> MixedClassifier:
        """Return a mixed classifier of the run's two classifiers, on the device."""
        return MixedClassifier.from_mixture(self.std, self.rob, mixture).to(self.device)

    def logits(self, model: Any, x: Tensor) -> Tensor:
        """Return logits (B, K) in float32, whatever the precision of the attacks' gradients."""
        return Verifier(model, self.shape(x)).logits(x)

    def shape(self, x: Tensor) -> BatchShape:
        """Return the batch shape of all passes on this type of device; `x` are any images of the run.

        The first call decides on rows and precisions, which a run stores for each type of device if any is "auto".
        """
        if self._shape is None:
            if "auto" in (self.spec.batch_size, self.spec.precision):
                found = device_settings(Store(self.spec.run_uri), device_type(self.device), lambda: self._measured(x))
            else:
                found = self._measured(x)
            for role, network in self.networks.items():
                self.copies.decide(network, found.precision[role])
            self._shape, self._decided = BatchShape(found.rows, float32_rows=found.float32_rows), found
        return self._shape

    def counts(
        self, classifier: str, clean: Tensor, y: Tensor, robust_B: Tensor, n_forward: int, n_backward: int = 0
    ) -> dict[str, Any]:
        """Return the counts of the partition's summary, for the classifier with this name.

        Args:
            clean: the logits of the clean images, (B, K), or whether they are classified correctly, (B,) bool.
        """
        return {
            "classifier": classifier,
            "clean_correct": int((clean if clean.dtype == torch.bool else clean.argmax(dim=1) == y).sum()),
            "robust": int(robust_B.sum()),
            "n_forward": n_forward,
            "n_backward": n_backward,
        }

    def attacked(
        self,
        partition: Partition,
        model: nn.Module,
        attacks: Sequence[str],
        budget: AttackBudget,
        *,
        name: str = "model",
        group: Callable[[Partition], Group] | None = None,
        **options: Any,
    ) -> AttackResult:
        """Attack a partition's images with an engine that continues from partition to partition.

        Args:
            name: name of the engine, if a task has several.
            group: returns a partition's images as they enter the engine, for example with a warm start.
            options: further arguments of `Scheduler`.
        """
        if name not in self._engines:
            x, _ = self.images(partition)
            common = {"threat": self.spec.threat, "seed": self.spec.seed, "shape": self.shape(x), "copies": self.copies}
            self._engines[name] = Scheduler(model, x, attacks=attacks, budget=budget, **{**common, **options})
        return self._engines[name].finish(partition, group or self.group, self._prefetched)

    def group(self, partition: Partition) -> Group:
        """Return a partition's images in the form that an engine accepts."""
        x, y = self.images(partition)
        return Group(x, y, range(partition.start, partition.stop))

    @contextmanager
    def at(
        self, partition: Partition, rows: str, mixture: Mixture | None = None, prefetched: Sequence[Partition] = ()
    ) -> Iterator[None]:
        """Set up the tools for a partition of the folder `rows`, which the block computes; engines may prefetch."""
        if rows != self._rows:
            self._engines, self._rows = {}, rows
            self.model, self.model_name = (self.mixed(mixture), "mixed") if mixture else (self.rob, "rob")
        self._read = {each: images for each, images in self._read.items() if each in (partition, *prefetched)}
        self._prefetched = prefetched
        token = partial_results.set(False)  # an interrupted attack would be stored as if it were complete
        try:
            yield
        except BaseException:
            self._engines = {}
            raise
        finally:
            partial_results.reset(token)

    def settings(self, x: Tensor) -> dict[str, Any]:
        """Return rows, precisions and repeatability as fields of `PartitionSummary`."""
        shape = self.shape(x)
        precision = ", ".join(f"{role} {precision}" for role, precision in self._decided.precision.items())
        rows = {"rows": shape.rows, "float32_rows": shape.float32.rows}  # fewer after the memory has run out
        return {**rows, "precision": precision, "repeatable": self._decided.repeatable}

    def _measured(self, x: Tensor) -> DeviceSettings:
        """Return rows and precisions as configured or, for "auto", as they suit this device and these images."""
        rows, model = self.spec.batch_size, self.rob
        if "std" in self.networks:
            model = MixedClassifier(self.std, self.rob, IdentityTransform(), 0.5)
        if rows == "auto":
            rows = measured_rows(model, x, self.spec.precision, n_images=(1 + PREFETCHED) * len(x))
        trial = FastCopies(self.spec.precision)  # the run's copies are made, and perhaps compiled, after this decision
        return DeviceSettings(
            rows=rows,
            float32_rows=BatchShape.of(rows, x.device).float32.rows,
            precision={role: trial.of_network(net, x, rows).precision for role, net in self.networks.items()},
            repeatable=repeats_its_bits(model, x, rows, self.spec.precision),
        )


def device_type(device: torch.device) -> str:
    """Return the name of a GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_settings(run: Store, device: str, measure: Callable[[], DeviceSettings]) -> DeviceSettings:
    """Return the settings that a run stores for a type of device, after measuring and storing them if there are none.

    All partitions are then computed in the same way, also after the run is resumed. If two workers measure at the same
    time, the settings that are stored first count.
    """
    path = f"acceleration/{re.sub('[^A-Za-z0-9]+', '-', device)}.json"
    while True:
        try:
            return DeviceSettings(**read_signed_json(content := run.read(path)))
        except MissingArtifact:
            run.create(path, signed_json(asdict(measure())))
        except (ValueError, TypeError):  # the file is damaged
            run.set_aside(path, hashlib.sha256(content).hexdigest())
