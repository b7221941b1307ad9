"""What a stage computes with on one worker: the run's classifiers on its device, its images, and stored rows.

A stage's `compute(worker, piece)` gets a `Workbench`::

    x, y = worker.images(piece)        images (B, C, H, W) in [0, 1] and labels (B,), on the device
    worker.rob, worker.std             the run's classifiers on the device
    worker.model                       what the stage is about: the run's mixture, or rob
    worker.logits(model, x)            (B, K) in float32, whatever the precision of the attacks' gradients
    worker.stored(piece, stage, fingerprint, column)   the piece's rows of a column of an earlier stage
    worker.attacked(piece, make)       the piece's images at the end of an engine of attacks
    worker.summary(...)                the counts of the receipt
    worker.spec                        seed, threat model, URIs of the run
    worker.shape(x), worker.copies    rows of each pass, and the fast copies that gradients are taken through

Slots that empty while a piece's last images are attacked go to images of prefetched pieces, those that the worker gets
next: one engine for each attacked network goes from piece to piece. An image's result does not depend on its company,
so rows are the same bits whatever was prefetched.

Shapes: B images of a piece, C x H x W, K classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.batch_shape import BatchShape
from ..acceleration.precision import FastCopies, Precision
from ..attacks.gradient_model import measured_rows, repeats_its_bits
from ..attacks.result import AttackResult
from ..attacks.scheduler import Group, Scheduler
from ..attacks.stream import Stream
from ..attacks.verification import Verifier
from ..images.datasets import Dataset
from ..mixing.classifier import MixedClassifier
from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform
from ..storage.partitions import Partition
from ..storage.store import Store
from ..storage.tables import read_columns
from .worker_spec import WorkerSpec


class Workbench:
    """One worker's, for all pieces of all tasks that it gets.

    Args:
        networks: "std", where the run has one, and "rob", on the device.
    """

    def __init__(
        self, spec: WorkerSpec, networks: Mapping[str, nn.Module], store: Store, dataset: Dataset, device: torch.device
    ) -> None:
        self.spec, self.networks, self.store, self.device = spec, networks, store, device
        self.copies = FastCopies(spec.precision, compile=spec.compile)
        self._dataset = dataset
        self._read: dict[Partition, tuple[Tensor, Tensor]] = {}  # images of the piece at hand and prefetched ones
        self._settled: tuple[BatchShape, dict[str, Precision], bool] | None = None
        self._streams: dict[str, Stream] = {}  # of the task at hand, by what they attack
        self._task: tuple[str, str] | None = None  # its stage and fingerprint
        self._mixture: Mixture | None = None  # what it is about
        self._model: MixedClassifier | None = None
        self._prefetched: Sequence[Partition] = ()

    # --- for stages ---------------------------------------------------------------------------------------------------

    @property
    def std(self) -> nn.Module:
        """The standard classifier; KeyError in a run without one."""
        return self.networks["std"]

    @property
    def rob(self) -> nn.Module:
        """The robust classifier."""
        return self.networks["rob"]

    def images(self, piece: Partition) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) in [0, 1] and labels (B,), on the device."""
        if piece not in self._read:
            x, y = self._dataset.read(piece.start, piece.stop)
            self._read[piece] = x.to(self.device), y.to(self.device)
        return self._read[piece]

    def stored(self, piece: Partition, stage: str, fingerprint: str, column: str) -> Tensor:
        """A piece's rows of one column of another stage's file, on the device; errors as in `read_columns`."""
        return read_columns(self.store, stage, [piece], fingerprint, [column])[column].to(self.device)

    @property
    def model(self) -> nn.Module:
        """The mixture that the task at hand is about; rob where it is about none."""
        if self._mixture is None:
            return self.rob
        self._model = self._model or self.mixed(self._mixture)
        return self._model

    @property
    def model_name(self) -> str:
        """What receipts and columns call it: "mixed" or "rob"."""
        return "rob" if self._mixture is None else "mixed"

    def mixed(self, mixture: Mixture) -> MixedClassifier:
        """Return a mixture of the run's two classifiers, on the device."""
        return MixedClassifier.from_mixture(self.std, self.rob, mixture).to(self.device)

    def logits(self, model: Any, x: Tensor) -> Tensor:
        """(B, K) in float32, in passes of the run's batch shape."""
        return Verifier(model, self.shape(x)).logits(x)

    def shape(self, x: Tensor) -> BatchShape:
        """The batch shape of every pass of the run on this type of device; `x` are any images of it."""
        return self._decisions(x)[0]

    def summary(
        self, classifier: str, clean_BK: Tensor, y: Tensor, robust_B: Tensor, n_forward: int, n_backward: int = 0
    ) -> dict[str, Any]:
        """The receipt's counts, of the classifier of that name."""
        return {
            "classifier": classifier,
            "clean_correct": int((clean_BK.argmax(dim=1) == y).sum()),
            "robust": int(robust_B.sum()),
            "n_forward": n_forward,
            "n_backward": n_backward,
        }

    def attacked(
        self,
        piece: Partition,
        make: Callable[[], Scheduler],
        *,
        name: str = "model",
        group: Callable[[Partition], Group] | None = None,
    ) -> AttackResult:
        """The piece's images at the end of an engine that goes from piece to piece.

        Args:
            make: the engine, made at the task's first piece.
            name: of what it attacks, where a task has several engines.
            group: a piece's images as they enter, with points that are tried first for instance.
        """
        if name not in self._streams:
            self._streams[name] = Stream(make(), group or self.group)
        return self._streams[name].finish(piece, self._prefetched)

    def group(self, piece: Partition) -> Group:
        """A piece's images as an engine takes them."""
        x, y = self.images(piece)
        return Group(x, y, range(piece.start, piece.stop))

    # --- for the worker -----------------------------------------------------------------------------------------------

    @contextmanager
    def at(
        self,
        piece: Partition,
        stage: str,
        fingerprint: str,
        *,
        mixture: Mixture | None = None,
        prefetched: Sequence[Partition] = (),
    ) -> Iterator[None]:
        """In here a task's rows of a piece are computed; engines take in the prefetched pieces as slots empty."""
        if (stage, fingerprint) != self._task:
            self._streams, self._task = {}, (stage, fingerprint)
            self._mixture, self._model = mixture, None
        self._read = {each: images for each, images in self._read.items() if each in (piece, *prefetched)}
        self._prefetched = prefetched
        try:
            yield
        except BaseException:
            self._streams = {}
            raise

    @property
    def n_forward_begun(self) -> int:
        """Passes so far of images of prefetched pieces."""
        return sum(stream.n_forward_begun for stream in self._streams.values())

    def precisions(self, x: Tensor) -> str:
        """What each network's gradients are computed in."""
        return ", ".join(f"{role} {precision}" for role, precision in self._decisions(x)[1].items())

    def repeatable(self, x: Tensor) -> bool:
        """Whether a pass over the same images gives the same bits again; else only verdicts repeat."""
        return self._decisions(x)[2]

    def _decisions(self, x: Tensor) -> tuple[BatchShape, dict[str, Precision], bool]:
        """Rows, precisions, and whether passes repeat their bits."""
        if self._settled is None:
            self.use(self.measured(x))
        assert self._settled is not None
        return self._settled

    def use(self, measured: Mapping[str, Any]) -> None:
        """Compute with the rows and precisions that were measured on a device of this type."""
        if self._settled is None:
            for role, network in self.networks.items():
                self.copies.decide(network, measured["precision"][role])
            shape = BatchShape(measured["rows"], float32_rows=measured.get("float32_rows"))
            self._settled = shape, measured["precision"], measured.get("repeatable", True)

    def measured(self, x: Tensor) -> dict[str, Any]:
        """Return rows and precisions as configured or, for "auto", as they suit this device and these images."""
        rows, model = self.spec.batch_size, self.rob
        if "std" in self.networks:
            model = MixedClassifier(self.std, self.rob, IdentityTransform(), 0.5)
        if rows == "auto":
            rows = measured_rows(model, x, self.spec.precision)
        # Copies of its own: those of the run are made, and perhaps compiled, once it is known in what.
        trial = FastCopies(self.spec.precision)
        networks = self.networks.items()
        return {
            "rows": rows,
            "float32_rows": BatchShape.of(rows, x.device).float32.rows,
            "precision": {role: trial.of_network(net, x, rows).precision for role, net in networks},
            "repeatable": repeats_its_bits(model, x, rows, self.spec.precision),
        }
