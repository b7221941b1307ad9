"""A refinement round on a worker: attack the chosen mixed classifiers on one partition.

Shapes: B images of a partition, C x H x W, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attacks.adaptive import autoattack
from ..attacks.budget import AttackBudget
from ..attacks.gradient_model import AttackMode
from ..distributed.tasks import Columns, Counts, Task
from ..distributed.workbench import Workbench
from ..mixing.margins import log_one_minus_signed_margin
from ..mixing.mixture import Mixture
from ..storage.partitions import Partition, Sample
from .points import StoredPoints, hardest_points, read_points


@dataclass(frozen=True, kw_only=True)
class RoundTask(Task):
    """Attacks each mixed classifier on the images near its threshold that no stored adversarial example breaks.

    The columns of mixed classifier i end in `_i`: `tried`, `broken`, the raw logits of both base classifiers at the
    adversarial example, and `x_adv`. Rows of images that were not tried hold zeros, and the clean image as `x_adv`. The
    examples against one mixed classifier are tried on the next one.
    """

    budget: AttackBudget
    mixtures: tuple[Mixture, ...]
    reaches: tuple[float, ...]  # for each: an image whose log(1 - margin) of M(rob) is lower is not attacked
    attacks: tuple[str, ...]  # if empty, the round only stores the hardest known example of each image
    mode: AttackMode
    eot: int | None = None  # draws per gradient of a random classifier
    points: tuple[StoredPoints, ...]  # the first source is the attack stage, whose rows also hold `rob_broken`
    sample: Sample | None = None  # the images that the search reads; None for all images

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        x, y = worker.images(partition)
        kept = self._kept_by_rob(worker, partition)
        points, columns, robust = read_points(worker, partition, self.points), dict[str, Tensor](), kept
        rob_at = [worker.logits(worker.rob, x_adv) for x_adv in points]
        n_forward = n_backward = 0
        for i, (mixture, reach) in enumerate(zip(self.mixtures, self.reaches, strict=True)):
            mixed = worker.mixed(mixture)
            hardest = hardest_points(worker, mixed, x, y, points)
            robust = kept & _right(worker, mixed, x, y) & _right(worker, mixed, hardest, y)
            near = robust & (_largest_gap(mixture, y, rob_at) >= reach)
            tried = (near if self.attacks else kept).nonzero().squeeze(1)
            found, broken = hardest.clone(), kept & ~robust
            if len(tried) and self.attacks:
                outcome = autoattack(
                    mixed, x[tried], y[tried], threat=worker.spec.threat, attacks=self.attacks, mode=self.mode,
                    eot=self.eot, seed=worker.spec.seed, cached_BCHW=hardest[tried], budget=self.budget,
                    batch_size=worker.shape(x), sample_ids=[partition.start + i for i in tried.tolist()],
                    precision=worker.copies,
                    # The next choices have other thresholds, so the attack goes on to the smallest margin.
                    stop_when_broken=False,
                )  # fmt: skip
                found[tried] = outcome.x_adv
                broken[tried] = ~outcome.robust
                n_forward, n_backward = n_forward + outcome.n_forward, n_backward + outcome.n_backward
            rows = torch.zeros_like(kept).index_fill_(0, tried, True)
            points.append(torch.where(rows[:, None, None, None], found, x))
            rob_at.append(worker.logits(worker.rob, points[-1]))
            columns |= {
                f"tried_{i}": rows,
                f"broken_{i}": broken,
                f"rob_attacked_{i}": _logits_of(rows, rob_at[-1]),
                f"std_attacked_{i}": _logits_of(rows, worker.logits(worker.std, found)),
                f"x_adv_{i}": points[-1],
            }
            robust = robust & ~broken
        clean = worker.logits(worker.mixed(self.mixtures[0]), x)
        return columns, worker.counts("mixed", clean, y, robust, n_forward, n_backward)

    def _kept_by_rob(self, worker: Workbench, partition: Partition) -> Tensor:
        """Return on which images that the search reads the robust classifier remains robust, (B,) bool."""
        first = self.points[0]
        kept = ~worker.stored(partition, first.stage, first.content_hash, "rob_broken")
        if self.sample is not None:
            drawn = torch.zeros_like(kept)
            drawn[self.sample.rows_of(partition).to(kept.device)] = True
            kept &= drawn
        return kept


def _largest_gap(mixture: Mixture, y: Tensor, rob_at: Sequence[Tensor]) -> Tensor:
    """Return log(1 - margin) of M(rob) at the hardest point of each image, (B,), from the logits at each point."""
    mapped = (mixture.transform(logits.double()) for logits in rob_at)
    return torch.stack([log_one_minus_signed_margin(logits, y) for logits in mapped]).amax(dim=0)


def _right(worker: Workbench, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return worker.logits(model, x).argmax(dim=1) == y


def _logits_of(rows: Tensor, logits: Tensor) -> Tensor:
    """Return the logits with zeros in all other rows."""
    return torch.where(rows[:, None], logits, torch.zeros_like(logits))
