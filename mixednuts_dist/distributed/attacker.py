"""What a worker computes of a piece's images: the columns of its file and the counts of its receipt.

Seats that empty while a piece's last images are attacked go to images of the pieces that the worker gets next: one
engine for each attacked network goes from piece to piece. An image's result does not depend on its company, so rows
are the same bits whatever was begun ahead.

Shapes: B images of a piece, C x H x W, K classes.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.arithmetic import Arithmetic, Precision
from ..acceleration.batch_shape import BatchShape
from ..attacks.adaptive import (
    AttackOutcome,
    adaptive_autoattack,
    ensemble_engine,
    ensemble_outcome,
    pyautoattack_images,
    transferred_attack,
)
from ..attacks.engine import Engine, Group, Progress, Stream
from ..attacks.gradient_model import AttackedModel, rows_that_fit
from ..attacks.judge import Judge
from ..attacks.minimum_margin import (
    MinimumMarginResult,
    black_box_margin_attack,
    margin_engine,
    margin_result,
)
from ..attacks.red_flags import raised_flags
from ..config import digest
from ..mixing.classifier import MixedClassifier
from ..mixing.margins import log_one_minus_signed_margin
from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform, LayerNormTransform
from ..storage.damage import set_aside_if_damaged
from ..storage.partitions import Partition, whole_of
from ..storage.store import Store
from ..storage.tables import FLAG, SURVIVED, read_columns
from ..uris import is_black_box
from .tasks import AttackTask, CheckTask, EvaluateTask, RoundTask, StoredPoints, Task, WorkerSpec

logger = logging.getLogger(__name__)

STD_ATTACKS = ("apgd-ce", "apgd-t")  # what std's robust accuracy is measured under

Columns = dict[str, Tensor]
Summary = dict[str, Any]
Images = Callable[[Partition], tuple[Tensor, Tensor]]  # of a piece: (B, C, H, W) and labels (B,), on the device


@dataclass
class Attacker:
    """The run's classifiers on one device, attacked as the tasks say."""

    spec: WorkerSpec
    networks: dict[str, nn.Module]  # "std", where the run has one, and "rob"
    store: Store
    images: Images
    arithmetic: Arithmetic = field(init=False)
    decided: float = field(init=False, default=0.0)  # images of unfinished pieces, a share for each attack that is done
    on_decided: Callable[[float], None] | None = field(init=False, default=None)  # told of it in the same process
    _decided: tuple[BatchShape, dict[str, Precision]] | None = field(init=False, default=None)
    _streams: dict[str, Stream] = field(init=False, default_factory=dict)  # of the task at hand, by role
    _task: tuple[str, str] | None = field(init=False, default=None)  # its stage and fingerprint
    _ahead: Sequence[Partition] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.arithmetic = Arithmetic(self.spec.precision, compile=self.spec.compile)

    @property
    def std(self) -> nn.Module:
        return self.networks["std"]

    @property
    def rob(self) -> nn.Module:
        return self.networks["rob"]

    def precisions(self, x: Tensor) -> str:
        """What each network's gradients are computed in."""
        return ", ".join(f"{role} {precision}" for role, precision in self._settled(x)[1].items())

    def shape(self, x: Tensor) -> BatchShape:
        """The batch shape of every pass of the run on this type of device."""
        return self._settled(x)[0]

    def _settled(self, x: Tensor) -> tuple[BatchShape, dict[str, Precision]]:
        """Rows and precisions as configured or, where that is "auto", as the run's first worker on such a device found.

        One worker decides for all, in `acceleration/<device>.json`: rows of one run come from one arithmetic.
        """
        if self._decided is None:
            given = self.spec.batch_size, self.spec.precision
            found = self._measured(x) if "auto" not in given else self._first_measured(x)
            for role, network in self.networks.items():
                self.arithmetic.decide(network, found["precision"][role])
            self._decided = BatchShape(found["rows"]), found["precision"]
        return self._decided

    def _first_measured(self, x: Tensor) -> dict[str, Any]:
        kind = torch.cuda.get_device_name(x.device) if x.is_cuda else x.device.type
        path = f"acceleration/{re.sub('[^A-Za-z0-9]+', '-', kind)}.json"
        while True:
            if not self.store.exists(path):
                measured = self._measured(x)
                self.store.create(path, json.dumps({**measured, "digest": digest(measured)}).encode())
            try:
                found: dict[str, Any] = json.loads(self.store.read(path))  # whoever was first
                if found.pop("digest", None) not in (None, digest(found)):  # none: of the release before
                    raise ValueError("its content has changed")
            except (ValueError, AttributeError) as error:
                logger.warning("%s is damaged (%s); it is measured again", self.store.address(path), error)
                set_aside_if_damaged(self.store, path)
            else:
                return found

    def _measured(self, x: Tensor) -> dict[str, Any]:
        rows = self.spec.batch_size
        if rows == "auto":
            model: nn.Module = self.rob
            if "std" in self.networks:
                model = MixedClassifier(self.std, self.rob, IdentityTransform(), 0.5)
            rows = rows_that_fit(model, x, self.spec.precision)
        # Copies of its own: those of the run are made, and perhaps compiled, once it is known in what.
        trial = Arithmetic(self.spec.precision)
        networks = self.networks.items()
        return {"rows": rows, "precision": {role: trial.network_copy(net, x, rows).precision for role, net in networks}}

    def work(self, partition: Partition, task: Task, ahead: Sequence[Partition] = ()) -> tuple[Columns, Summary]:
        """The task on the images of a piece; `ahead` are those that come next, to be begun as seats empty."""
        if (task.stage, task.fingerprint) != self._task:
            self._streams, self._task = {}, (task.stage, task.fingerprint)
        self._ahead, self.decided = ahead, 0.0
        x, y = self.images(partition)
        try:
            return self._work(partition, x, y, task)
        except BaseException:
            self._streams = {}
            raise

    def _work(self, partition: Partition, x: Tensor, y: Tensor, task: Task) -> tuple[Columns, Summary]:
        if isinstance(task, AttackTask):
            return self.attack(partition, x, y, task)
        if isinstance(task, RoundTask):
            return self.challenge(partition, x, y, task)
        if isinstance(task, CheckTask):
            return self.check(partition, x, y, task)
        if isinstance(task, EvaluateTask):
            return self.evaluate(partition, x, y, task)
        raise TypeError(f"no worker knows a {type(task).__name__}")

    @property
    def n_forward_begun(self) -> int:
        """Passes so far of images of later pieces."""
        return sum(stream.n_forward_begun for stream in self._streams.values())

    def _stream(
        self, role: str, attacks: int, make: Callable[[], Engine], group: Callable[[Partition], Group]
    ) -> Stream:
        """The engine that goes from piece to piece with one of a task's so many attacks."""
        if role not in self._streams:
            engine = make()
            engine.progress = lambda _: self._tell(sum(each.n_decided for each in self._streams.values()) / attacks)
            self._streams[role] = Stream(engine, group)
        return self._streams[role]

    def _tell(self, decided: float) -> None:
        self.decided = decided
        if self.on_decided is not None:
            self.on_decided(decided)

    def _group(self, partition: Partition) -> Group:
        x, y = self.images(partition)
        return Group(x, y, range(partition.start, partition.stop))

    def _counted(self, n_images: int, attack: int = 0, attacks: int = 1) -> Callable[[Progress], None]:
        """Tells how far one of so many attacks on a piece's images is; images that it leaves out are done."""
        return lambda told: self._tell(((attack + 1) * n_images - told.n_images + told.n_decided) / attacks)

    def attack(self, partition: Partition, x: Tensor, y: Tensor, task: AttackTask) -> tuple[Columns, Summary]:
        """MMAA on LayerNormed rob, and the plain APGD pair on std (rob's images where std has no gradients)."""
        found = self._minimum_margins(partition, x, y, task)
        rob_clean = self._logits(self.rob, x)
        columns = {
            "rob_clean": rob_clean,
            "rob_attacked": self._logits(self.rob, found.x_adv),
            "margin": found.margin,
            "log_one_minus_margin": found.log_one_minus_margin,
            "rob_broken": found.broken,
            "x_adv": found.x_adv,
        }
        summary = _summary("rob", rob_clean, y, ~found.broken, found.n_forward, found.n_backward)
        if "std" in self.networks:
            std = self._std_attacked(partition, x, y, task, found)
            std_clean = self._logits(self.std, x)
            columns |= {"std_clean": std_clean, "std_attacked": std.logits, "std_broken": ~std.robust}
            columns["std_at_rob_attacked"] = self._logits(self.std, found.x_adv)
            summary["n_forward"] += std.n_forward
            summary["n_backward"] += std.n_backward
        return columns, summary

    def _minimum_margins(self, partition: Partition, x: Tensor, y: Tensor, task: AttackTask) -> MinimumMarginResult:
        rob = nn.Sequential(self.rob, task.logit_map or LayerNormTransform(self.spec.ln_k))
        batch, budget = self.shape(x), task.budget
        if task.method == "square":
            return black_box_margin_attack(
                rob, x, y, threat=self.spec.threat, n_queries=budget.n_queries, seed=self.spec.seed,
                stop_when_broken=task.stop_when_broken, sample_ids=range(partition.start, partition.stop),
                batch_size=batch, progress=self._counted(len(x), 0, len(self.networks)),
            )  # fmt: skip

        def make() -> Engine:
            return margin_engine(
                rob, x, threat=self.spec.threat, budget=budget, seed=self.spec.seed,
                stop_when_broken=task.stop_when_broken, shape=batch, arithmetic=self.arithmetic,
            )  # fmt: skip

        stream = self._stream("rob", len(self.networks), make, self._group)
        return margin_result(stream.engine, stream.finish(partition, self._ahead))

    def _std_attacked(
        self, partition: Partition, x: Tensor, y: Tensor, task: AttackTask, found: MinimumMarginResult
    ) -> AttackOutcome:
        batch = self.shape(x)
        if is_black_box(str(self.spec.std_uri)):
            return transferred_attack(self.std, x, y, found.x_adv, batch_size=batch)

        def make() -> Engine:
            return ensemble_engine(
                self.std, x, threat=self.spec.threat, attacks=STD_ATTACKS, seed=self.spec.seed, budget=task.budget,
                shape=batch, arithmetic=self.arithmetic,
            )  # fmt: skip

        stream = self._stream("std", len(self.networks), make, self._group)
        return ensemble_outcome(stream.engine, STD_ATTACKS, stream.finish(partition, self._ahead))

    def evaluate(self, partition: Partition, x: Tensor, y: Tensor, task: EvaluateTask) -> tuple[Columns, Summary]:
        """The adaptive AutoAttack on the task's mixture; plain AutoAttack where there is rob alone."""
        mixed = None if task.mixture is None else self.mixed(task.mixture, task).to(x.device)
        model = self.rob if mixed is None else mixed

        def make() -> Engine:
            return ensemble_engine(
                model, x, threat=self.spec.threat, attacks=task.attacks, mode=task.mode, seed=self.spec.seed,
                budget=task.budget, shape=self.shape(x), arithmetic=self.arithmetic,
            )  # fmt: skip

        def with_points(piece: Partition) -> Group:
            group = self._group(piece)
            if mixed is None:
                return group
            return replace(group, known=self._hardest(mixed, group.y, self._stored(piece, task.points, group.x)))

        stream = self._stream("model", 1, make, with_points)
        outcome = ensemble_outcome(stream.engine, task.attacks, stream.finish(partition, self._ahead))
        name, attacked = "rob" if mixed is None else "mixed", AttackedModel.of(model, mode=task.mode)
        return self._outcome_columns(name, model, attacked, x, y, outcome)

    def check(self, partition: Partition, x: Tensor, y: Tensor, task: CheckTask) -> tuple[Columns, Summary]:
        """The unmodified pyautoattack on the task's images of the partition; the float32 judge says what it broke.

        A mixture is given to it with the surrogate's gradient (`as_bypass`).
        """
        name, model, attacked = "rob", self.rob, self.rob
        if task.mixture is not None:
            mixed = self.mixed(task.mixture, task).to(x.device)
            name, model, attacked = "mixed", mixed, mixed.as_bypass()
        chosen = [i in task.chosen for i in range(partition.start, partition.stop)]
        tried = torch.tensor(chosen, device=x.device)
        rows, x_adv, n_forward, n_backward = tried.nonzero().squeeze(1), x.clone(), 0, 0
        if len(rows):
            x_adv[rows], n_forward, n_backward = pyautoattack_images(
                attacked, x[rows], y[rows], threat=self.spec.threat, budget=task.budget, seed=self.spec.seed,
                batch_size=self.shape(x).rows,
            )  # fmt: skip
        clean, logits = self._logits(model, x), self._logits(model, x_adv)
        broken = tried & (logits.argmax(dim=1) != y)
        columns = {"tried": tried, "broken": broken, f"{name}_attacked": logits, "x_adv": x_adv}
        return columns, _summary(name, clean, y, tried & ~broken, n_forward, n_backward)

    def _outcome_columns(
        self, name: str, model: nn.Module, attacked: AttackedModel, x: Tensor, y: Tensor, outcome: AttackOutcome
    ) -> tuple[Columns, Summary]:
        clean = self._logits(model, x)
        flags = raised_flags(attacked, x, y, outcome.unconfirmed, batch_size=self.shape(x))
        columns = {
            f"{name}_clean": clean,
            f"{name}_attacked": outcome.logits,
            "robust": outcome.robust,
            **{f"{SURVIVED}{attack}": survived for attack, survived in outcome.survived.items()},
            **{f"{FLAG}{flag}": raised for flag, raised in flags.items()},
            "x_adv": outcome.x_adv,
        }
        return columns, _summary(name, clean, y, outcome.robust, outcome.n_forward, outcome.n_backward)

    def challenge(self, partition: Partition, x: Tensor, y: Tensor, task: RoundTask) -> tuple[Columns, Summary]:
        """Each of the task's mixtures attacked on near images that rob keeps and that no stored point breaks.

        The columns of mixture i end in `_i`: `tried`, `broken`, and the raw logits of both classifiers at the point
        found, `x_adv`; rows that were not tried, or are not of the task's sample, hold zeros. What is found against
        one mixture is tried on the next.
        """
        first = task.points[0]
        kept = ~self._column(partition, first.stage, first.fingerprint, "rob_broken").to(x.device)
        if task.sample is not None:
            drawn = torch.zeros_like(kept)
            drawn[task.sample.rows_of(partition).to(x.device)] = True
            kept &= drawn
        points, columns = self._stored(partition, task.points, x), dict[str, Tensor]()
        n_forward = n_backward = 0
        standing = kept
        for i, (mixture, reach) in enumerate(zip(task.mixtures, task.reaches, strict=True)):
            mixed = self.mixed(mixture, task).to(x.device)
            hardest = self._hardest(mixed, y, points)
            standing = kept & self._right(mixed, x, y) & self._right(mixed, hardest, y)
            near = standing & (self._largest_gap(mixture, y, points) >= reach)
            tried = (near if task.attacks else kept).nonzero().squeeze(1)
            found, broken = hardest.clone(), kept & ~standing
            if len(tried) and task.attacks:
                outcome = adaptive_autoattack(
                    mixed, x[tried], y[tried], threat=self.spec.threat, attacks=task.attacks, mode=task.mode,
                    seed=self.spec.seed, cached_BCHW=hardest[tried], budget=task.budget, batch_size=self.shape(x),
                    sample_ids=[partition.start + i for i in tried.tolist()], arithmetic=self.arithmetic,
                    # The next choices have other cutoffs: a point that only just fools this one says little of them.
                    stop_when_broken=False,
                    progress=self._counted(len(x), i, len(task.mixtures)),
                )  # fmt: skip
                found[tried] = outcome.x_adv
                broken[tried] = ~outcome.robust
                n_forward, n_backward = n_forward + outcome.n_forward, n_backward + outcome.n_backward
            rows = torch.zeros_like(kept).index_fill_(0, tried, True)
            points.append(torch.where(rows[:, None, None, None], found, x))
            columns |= {
                f"tried_{i}": rows,
                f"broken_{i}": broken,
                f"rob_attacked_{i}": self._at(self.rob, found, tried),
                f"std_attacked_{i}": self._at(self.std, found, tried),
                f"x_adv_{i}": torch.where(rows[:, None, None, None], found, torch.zeros_like(x)),
            }
            standing = standing & ~broken
        clean = self._logits(self.mixed(task.mixtures[0], task).to(x.device), x)
        return columns, _summary("mixed", clean, y, standing, n_forward, n_backward)

    def _stored(self, partition: Partition, points: tuple[StoredPoints, ...], x: Tensor) -> list[Tensor]:
        """The attacked images (B, C, H, W) that earlier stages have left; a row without one is the clean image."""
        found = []
        for source in points:
            for column in source.columns:
                x_adv = self._column(partition, source.stage, source.fingerprint, column).to(x.device)
                there = x_adv.flatten(1).any(dim=1)
                found.append(torch.where(there[:, None, None, None], x_adv, x))
        return found

    def _column(self, partition: Partition, stage: str, fingerprint: str, name: str) -> Tensor:
        """A piece's rows of one column of another stage's file."""
        whole = whole_of(partition)
        values = read_columns(self.store, stage, [whole], fingerprint, [name])[name]
        return values[partition.start - whole.start : partition.stop - whole.start]

    def _hardest(self, mixed: MixedClassifier, y: Tensor, points: list[Tensor]) -> Tensor:
        """Of each image's points the one at which the mixture's margin is the smallest, (B, C, H, W)."""
        gaps = torch.stack([log_one_minus_signed_margin(self._logits(mixed, x_adv), y) for x_adv in points])
        return torch.stack(points)[gaps.argmax(dim=0), torch.arange(len(y), device=y.device)]

    def _largest_gap(self, mixture: Mixture, y: Tensor, points: list[Tensor]) -> Tensor:
        """log(1 - margin) of M(rob) at each image's hardest point for it, (B,)."""
        mapped = (mixture.transform(self._logits(self.rob, x_adv).double()) for x_adv in points)
        return torch.stack([log_one_minus_signed_margin(logits, y) for logits in mapped]).amax(dim=0)

    def _right(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self._logits(model, x).argmax(dim=1) == y

    def _at(self, model: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
        """The logits of some rows, zeros in the others."""
        logits = self._logits(model, x)
        chosen = torch.zeros(len(x), dtype=torch.bool, device=x.device).index_fill_(0, rows, True)
        return torch.where(chosen[:, None], logits, torch.zeros_like(logits))

    def mixed(self, mixture: Mixture, task: EvaluateTask | RoundTask) -> MixedClassifier:
        """The mixture under attack."""
        surrogate = replace(mixture, surrogate_alpha=task.surrogate_alpha, rd=task.rd)
        return MixedClassifier.from_mixture(self.std, self.rob, surrogate)

    def _logits(self, model: Any, x: Tensor) -> Tensor:
        return Judge(model, self.shape(x)).logits(x)


def _summary(name: str, clean: Tensor, y: Tensor, robust: Tensor, n_forward: int, n_backward: int) -> Summary:
    """The receipt's counts, of the classifier `name`."""
    return {
        "classifier": name,
        "clean_correct": int((clean.argmax(dim=1) == y).sum()),
        "robust": int(robust.sum()),
        "n_forward": n_forward,
        "n_backward": n_backward,
    }
