"""FAB-T and Square from pyautoattack, subclassed: surrogate gradients for the first, keyed noise for both.

Their own global reseeding is fenced in, and the noise of an image depends on the seed and its sample id alone, so that
neither the batch nor the partitioning moves a result.
"""

from collections.abc import Sequence

import torch
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from ..threat import ThreatModel
from .projections import keyed_generator
from .victim import Victim


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
            # The published loop overwrites the logits that it gets.
            lambda x: victim.judge(x).clone(),
            norm=threat.norm,
            eps=threat.eps,
            n_queries=n_queries,
            n_restarts=1,
            seed=seed & 0x7FFFFFFF,
            device=device,
        )
        self.generator = keyed_generator(seed, "square")
        self.keys = [(seed, "square", 0, sample_id) for sample_id in sample_ids]

    def random_choice(self, shape: Sequence[int]) -> Tensor:
        """Random signs; a leading axis of images gets one keyed draw each (the start), or one for all (later)."""
        if len(shape) == 4 and shape[0] == len(self.keys) and shape[2:] != [1, 1]:
            noise = torch.stack([torch.rand(list(shape[1:]), generator=keyed_generator(*key)) for key in self.keys])
        else:
            noise = torch.rand(list(shape[-3:]), generator=self.generator).expand(list(shape))
        return (2 * noise - 1).sign().to(self.device)

    def random_int(self, low: int = 0, high: int = 1, shape: Sequence[int] = (1,)) -> Tensor:
        """Integers in [low, high), the same for every image."""
        draw = torch.rand(list(shape), generator=self.generator)
        return (low + (high - low) * draw).long().to(self.device)


def fab_attack(victim: Victim, x: Tensor, y: Tensor, threat: ThreatModel, n_iter: int, n_targets: int) -> Tensor:
    """FAB-T's images: inside the ball where it succeeded, the clean image elsewhere."""
    fab = SurrogateFab(victim, threat=threat, n_iter=n_iter, n_targets=n_targets, device=x.device)
    with torch.random.fork_rng(devices=_cuda_devices(x)):
        return _tensor(fab.perturb(x, y))


def square_attack(
    victim: Victim, x: Tensor, y: Tensor, threat: ThreatModel, n_queries: int, seed: int, sample_ids: Sequence[int]
) -> Tensor:
    """Square's images: adversarial where it succeeded, the clean image elsewhere."""
    square = KeyedSquare(victim, threat=threat, n_queries=n_queries, seed=seed, sample_ids=sample_ids, device=x.device)
    with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(x)):
        return _tensor(square.perturb(x, y))


def _cuda_devices(x: Tensor) -> list[torch.device]:
    return [x.device] if x.is_cuda else []


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
