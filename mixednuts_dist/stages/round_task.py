"""A refinement round on a worker: attack the chosen mixed classifiers on one partition.

Shapes: B images of a partition, C x H x W, K classes.
"""

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
from ..storage.partitions import Partition, Sample, rows_among
from .warm_start import StoredExamples, hardest_examples


@dataclass(frozen=True, kw_only=True)
class RoundTask(Task):
    """Attacks each mixed classifier on the images that no stored example breaks, with margins close to its threshold.

    The columns of mixed classifier i end in `_i`: `tried` (attacked), `broken`, the raw logits of both base classifiers
    at the adversarial example, and `x_adv`. Rows of images that were not attacked hold zeros, and the clean image as
    `x_adv`. The examples against one mixed classifier are also tried on the next one.
    """

    budget: AttackBudget
    mixtures: tuple[Mixture, ...]
    reaches: tuple[float, ...]  # per mixed classifier: images with a lower log(1 - margin) of M(rob) are not attacked
    attacks: tuple[str, ...]  # if empty, the round only stores the hardest stored example of each image
    mode: AttackMode
    eot: int | None = None  # draws per gradient of a random classifier
    sources: tuple[StoredExamples, ...]  # the first one is the attack stage, whose rows also hold `rob_broken`
    sample: Sample | None = None  # the images that the search reads; None for all images

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        x, y = worker.images(partition)
        kept, columns, n_forward, n_backward = self._kept_by_rob(worker, partition), dict[str, Tensor](), 0, 0
        examples = [x_adv for source in self.sources for x_adv in source.read(worker, partition)]
        rob_at = [worker.logits(worker.rob, x_adv) for x_adv in examples]
        for i, (mixture, reach) in enumerate(zip(self.mixtures, self.reaches, strict=True)):
            mixed = worker.mixed(mixture)
            found = hardest_examples(worker, mixed, x, y, examples)
            robust = kept & _right(worker, mixed, x, y) & _right(worker, mixed, found, y)
            broken, tried = kept & ~robust, kept
            if self.attacks:
                # log(1 - margin) of M(rob) at each example; the largest one belongs to the hardest example
                gaps = [log_one_minus_signed_margin(mixture.transform(logits.double()), y) for logits in rob_at]
                tried = robust & (torch.stack(gaps).amax(dim=0) >= reach)
            rows = tried.nonzero().squeeze(1)
            if self.attacks and len(rows):
                outcome = autoattack(
                    mixed, x[rows], y[rows], threat=worker.spec.threat, attacks=self.attacks, mode=self.mode,
                    eot=self.eot, seed=worker.spec.seed, cached_BCHW=found[rows], budget=self.budget,
                    batch_size=worker.shape(x), sample_ids=[partition.start + row for row in rows.tolist()],
                    precision=worker.copies,
                    # The next choices have other thresholds, so the attack goes on to the smallest margin.
                    stop_when_broken=False,
                )  # fmt: skip
                found = found.index_copy(0, rows, outcome.x_adv)
                broken[rows] = ~outcome.robust
                n_forward, n_backward = n_forward + outcome.n_forward, n_backward + outcome.n_backward
            examples.append(torch.where(tried[:, None, None, None], found, x))
            rob_at.append(worker.logits(worker.rob, examples[-1]))
            columns |= {
                f"tried_{i}": tried,
                f"broken_{i}": broken,
                f"rob_attacked_{i}": torch.where(tried[:, None], rob_at[-1], 0.0),
                f"std_attacked_{i}": torch.where(tried[:, None], worker.logits(worker.std, examples[-1]), 0.0),
                f"x_adv_{i}": examples[-1],
            }
            robust = robust & ~broken
        clean = worker.logits(worker.mixed(self.mixtures[0]), x)
        return columns, worker.counts("mixed", clean, y, robust, n_forward, n_backward)

    def _kept_by_rob(self, worker: Workbench, partition: Partition) -> Tensor:
        """Return the images that the search reads and on which the robust classifier remains robust, (B,) bool."""
        first = self.sources[0]
        kept = ~worker.stored(partition, first.stage, first.content_hash, "rob_broken")
        if self.sample is not None:
            drawn = torch.zeros_like(kept)
            drawn[rows_among(self.sample.ids(), partition).to(kept.device)] = True
            kept &= drawn
        return kept


def _right(worker: Workbench, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return worker.logits(model, x).argmax(dim=1) == y
