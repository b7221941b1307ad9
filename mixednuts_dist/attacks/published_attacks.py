"""FAB-T and Square from pyautoattack, subclassed: surrogate gradients for the first, keyed noise for both.

Their own global reseeding is fenced in, and the noise of an image depends on the seed and its sample id alone, so that
neither the batch nor the partitioning moves a result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from ..register import ATTACKS
from ..threat import ThreatModel
from .engine import Engine, Finished
from .gradient_model import AttackedModel
from .projections import keyed_generator
from .tracks import is_smaller


@dataclass(frozen=True)
class Victim:
    """What the published loops ask."""

    judge: Callable[[Tensor], Tensor]
    climb_and_judge: Callable[[Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, attacked: AttackedModel) -> "Victim":
        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            outputs = attacked.fast.run(x)
            return outputs.logits, outputs.model_logits

        return cls(attacked.model, both)


def with_published(engine: Engine, finished: Finished, attacks: Sequence[str]) -> Finished:
    """What the published FAB-T and Square add to what the engine has found, where they are not registered."""
    group, count = finished.group, PassCount()
    victim = count.watched(Victim.of(AttackedModel.of(engine.attacked.model)))
    best, broken, broken_by, log_gap = (
        finished.best,
        finished.broken.clone(),
        list(finished.broken_by),
        finished.log_gap,
    )
    assert engine.setting is not None
    n_targets = engine.budget.n_targets(engine.setting.n_classes)
    for name in attacks:
        if name in ATTACKS.names():
            continue
        for part in torch.split((~broken).nonzero().squeeze(1), engine.shape.rows) if not bool(broken.all()) else ():
            x, y, ids = group.x[part], group.y[part], [group.sample_ids[i] for i in part.tolist()]
            if name == "fab-t":
                found = fab_attack(victim, x, y, engine.threat, engine.budget.n_iter, n_targets)
            else:
                found = square_attack(victim, x, y, engine.threat, engine.budget.n_queries, engine.seed, ids)
            verdicts = engine.judge.verdicts(found, y)
            count.n_forward += len(part)
            smaller = is_smaller(verdicts.log_gap, verdicts.wrong, log_gap[part], broken[part])
            for i in smaller.nonzero().squeeze(1).tolist():
                row = int(part[i])
                best[row], log_gap[row], broken[row] = found[i], verdicts.log_gap[i], verdicts.wrong[i]
                broken_by[row] = name if verdicts.wrong[i] else ""
    return replace(
        finished, best=best, broken=broken, broken_by=broken_by, log_gap=log_gap,
        n_forward=finished.n_forward + count.n_forward, n_backward=finished.n_backward + count.n_backward,
    )  # fmt: skip


@dataclass
class PassCount:
    """Images that went forward and backward."""

    n_forward: int = 0
    n_backward: int = 0

    def watched(self, victim: Victim) -> Victim:
        """The same victim, each of whose passes is counted here."""

        def judge(x_BCHW: Tensor) -> Tensor:
            self.n_forward += len(x_BCHW)
            return victim.judge(x_BCHW)

        def climb_and_judge(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
            self.n_forward += len(x_BCHW)
            self.n_backward += len(x_BCHW)
            return victim.climb_and_judge(x_BCHW)

        return replace(victim, judge=judge, climb_and_judge=climb_and_judge)


class SurrogateFab(FABAttack_PT):  # type: ignore[misc]
    """Targeted FAB that linearises the climbed logits and asks the real classifier whether it has crossed."""

    def __init__(self, victim: Victim, *, threat: ThreatModel, n_iter: int, n_targets: int, device: torch.device):
        super().__init__(
            victim.judge,
            norm=threat.norm,
            eps=threat.eps,
            n_iter=n_iter,
            n_restarts=1,
            targeted=True,
            n_target_classes=n_targets,
            device=device,
        )
        self.victim = victim

    def get_diff_logits_grads_batch_targeted(
        self, imgs: Tensor, la: Tensor, la_target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The published hook: difference of two climbed logits, (B, 1), and its gradient, (B, 1, C, H, W)."""
        x = imgs.detach().clone().requires_grad_()
        with torch.enable_grad():
            climbed, _ = self.victim.climb_and_judge(x)
            difference = climbed.gather(1, la_target[:, None]) - climbed.gather(1, la[:, None])
            (grad,) = torch.autograd.grad(difference.sum(), x)
        return difference.detach(), grad[:, None]


class KeyedSquare(SquareAttack):  # type: ignore[misc]
    """Square whose initial stripes are keyed by sample id; the squares' places are drawn once for all images."""

    def __init__(
        self,
        victim: Victim,
        *,
        threat: ThreatModel,
        n_queries: int,
        seed: int,
        sample_ids: Sequence[int],
        device: torch.device,
    ):
        super().__init__(
            self._asked,
            norm=threat.norm,
            eps=threat.eps,
            n_queries=n_queries,
            n_restarts=1,
            seed=seed & 0x7FFFFFFF,
            device=device,
        )
        self.victim = victim
        self.generator = keyed_generator(seed, "square")
        self.keys = [(seed, "square", 0, sample_id) for sample_id in sample_ids]
        self._n_classes = 2

    def _asked(self, x: Tensor) -> Tensor:
        """Logits that the published loop may overwrite, which it does; it also asks about no image at all."""
        if not len(x):
            return x.new_zeros(0, self._n_classes)
        logits = self.victim.judge(self.cut(x)).clone()
        self._n_classes = logits.shape[1]
        return logits

    def random_choice(self, shape: Sequence[int]) -> Tensor:
        """Random signs; a leading axis of images gets one keyed draw each (the start), or one for all (later)."""
        if len(shape) == 4 and shape[0] == len(self.keys) and list(shape[2:]) != [1, 1]:
            noise = torch.stack([torch.rand(list(shape[1:]), generator=keyed_generator(*key)) for key in self.keys])
        else:
            noise = torch.rand(list(shape[-3:]), generator=self.generator).expand(list(shape))
        return (2 * noise - 1).sign().to(self.device)

    def random_int(self, low: int = 0, high: int = 1, shape: Sequence[int] = (1,)) -> Tensor:
        """Integers in [low, high), the same for every image."""
        draw = torch.rand(list(shape), generator=self.generator)
        return (low + (high - low) * draw).long().to(self.device)

    def cut(self, x_canvas: Tensor) -> Tensor:
        """The image on a canvas."""
        height, width = self._image_size
        return x_canvas[..., :height, :width]

    def search(self, x: Tensor, y: Tensor) -> Tensor:
        """The published search on all images, right or wrong; returns the best points that it ended on."""
        self._image_size = (x.shape[2], x.shape[3])
        canvas = on_canvas(x, self.norm)
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(x)):
            torch.random.manual_seed(self.seed)
            self.init_hyperparam(canvas)
            return self.cut(_tensor(self.attack_single_run(canvas, y)[1]))


def on_canvas(x: Tensor, norm: str) -> Tensor:
    """`x`, below and to the right extended by zeros where the published Square cannot work on its shape.

    Under L2 it lays out squares of a fifth of the height, and fails on images that these do not fit into. The canvas
    takes part in the perturbation's norm, so what is cut from it stays inside the ball.
    """
    height, width = x.shape[2:]
    if norm == "Linf" or (height == width and _tiles_fit(height)):
        return x
    side = max(height, width)
    while not _tiles_fit(side):
        side += 1
    return F.pad(x, (0, side - width, 0, side - height))


def _tiles_fit(side: int) -> bool:
    tile = side // 5
    return tile == 1 or (tile > 1 and (side - 5 * tile) // 2 + tile * (side // tile) <= side)


def fab_attack(victim: Victim, x: Tensor, y: Tensor, threat: ThreatModel, n_iter: int, n_targets: int) -> Tensor:
    """FAB-T's images: inside the ball where it succeeded, the clean image elsewhere."""
    fab = SurrogateFab(victim, threat=threat, n_iter=n_iter, n_targets=n_targets, device=x.device)
    with torch.random.fork_rng(devices=_cuda_devices(x)):
        return _tensor(fab.perturb(x, y))


def square_attack(
    victim: Victim, x: Tensor, y: Tensor, threat: ThreatModel, n_queries: int, seed: int, sample_ids: Sequence[int]
) -> Tensor:
    """Square's images: adversarial where it succeeded, its best attempt elsewhere."""
    square = KeyedSquare(victim, threat=threat, n_queries=n_queries, seed=seed, sample_ids=sample_ids, device=x.device)
    return square.search(x, y)


def _cuda_devices(x: Tensor) -> list[torch.device]:
    return [x.device] if x.is_cuda else []


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
