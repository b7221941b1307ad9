"""Votes of a classifier under Gaussian noise, with draws only where they can still change a certificate.

Draw d of an image is its pixels plus sigma times noise that depends on the seed, the image's id and d alone. So votes
do not depend on the partition, the order or the company of images. The first `n_choose` draws choose the class, the
ones after them bound its vote: the class must not be chosen on the draws that certify it.

Rows of one batch come from images at different counts: each batch is filled from a queue of images with the draws up
to their next look, and an image that is not decided there joins the queue again. Only the last batch has padding.

Shapes: B images of C x H x W, N draws, K classes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..norms.ball import key_number
from .certificates import vote_needed
from .confidence import Looks

_BLOCK = 16  # draws from one generator: making one costs as much as a few hundred random numbers
NOISE = "certify"  # in the key of the noise, which no attack's start has


@dataclass(frozen=True)
class SmoothingPlan:
    """The noise, the draws of each image and the questions that they have to answer."""

    sigma: float
    n: int  # draws that bound the vote, at most
    confidence: float
    n_choose: int  # draws that choose the class, before them
    alphas: tuple[float, ...]
    radii: tuple[float, ...]
    stop_when_decided: bool = True

    @property
    def looks(self) -> Looks:
        """When an image may stop."""
        return (Looks.of if self.stop_when_decided else Looks.one)(self.n, self.confidence)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The votes above which the mixture is certified, at each alpha and radius."""
        asked = {vote_needed(radius, sigma=self.sigma, alpha=alpha) for alpha in self.alphas for radius in self.radii}
        return tuple(sorted(asked))


@dataclass(frozen=True)
class Votes:
    """What the draws of some images said, on the host."""

    chosen_counts_BK: Tensor  # int32, of the draws that choose
    counts_BK: Tensor  # int32, of the draws that bound
    n_drawn_B: Tensor  # int32, of those
    logits_BNK: Tensor  # float16, of the first draws that choose
    n_forward: int

    @property
    def classes(self) -> Tensor:
        """The class with the most votes among the draws that choose, (B,)."""
        return self.chosen_counts_BK.argmax(dim=1)

    @property
    def hits(self) -> Tensor:
        """Votes for it among the draws that bound, (B,)."""
        return self.counts_BK.gather(1, self.classes[:, None]).squeeze(1)


def noisy(x_CHW: Tensor, sigma: float, seed: int, sample_id: int, start: int, stop: int) -> Tensor:
    """Draws `start` to `stop` of an image, (N, C, H, W).

    Noise is made where the image is: the same bits on each device of a kind, and no host makes it for an accelerator.
    """
    first, last = start // _BLOCK, (stop - 1) // _BLOCK
    blocks = [_noise_block(x_CHW, seed, sample_id, block) for block in range(first, last + 1)]
    rows = torch.cat(blocks)[start - first * _BLOCK : stop - first * _BLOCK]
    return x_CHW + sigma * rows


def _noise_block(x_CHW: Tensor, seed: int, sample_id: int, block: int) -> Tensor:
    generator = torch.Generator(x_CHW.device).manual_seed(key_number(seed, NOISE, sample_id, block))
    return torch.randn((_BLOCK, *x_CHW.shape), generator=generator, device=x_CHW.device, dtype=torch.float32)


class _Tally:
    """The votes of all images so far, on the host, and which draws each needs next."""

    def __init__(self, plan: SmoothingPlan, n_images: int, n_classes: int, n_kept: int, labels_B: Tensor) -> None:
        self.plan, self.looks, self._labels_B = plan, plan.looks, labels_B.cpu()
        self._thresholds_T = torch.tensor(plan.thresholds, dtype=torch.float64)
        self.counts_BHK = torch.zeros(n_images, 2, n_classes, dtype=torch.int32)  # H: draws that choose, that bound
        self.answered_B = torch.zeros(n_images, dtype=torch.int64)
        self.logits_BNK = torch.zeros(n_images, n_kept, n_classes, dtype=torch.float16)

    def add(self, image: int, start: int, logits_NK: Tensor) -> None:
        """The answers to draws `start`, `start + 1`, ... of an image."""
        n_choose, classes_N = self.plan.n_choose, logits_NK.argmax(dim=1)
        choosing = max(0, min(len(classes_N), n_choose - start))
        for half, votes in enumerate((classes_N[:choosing], classes_N[choosing:])):
            self.counts_BHK[image, half] += votes.bincount(minlength=logits_NK.shape[1]).int()
        kept = max(0, min(len(classes_N), self.logits_BNK.shape[1] - start))
        self.logits_BNK[image, start : start + kept] = logits_NK[:kept].half()
        self.answered_B[image] += len(classes_N)

    def next_draws(self, image: int) -> range:
        """The draws up to the image's next look; none where it is decided."""
        n_choose, answered = self.plan.n_choose, int(self.answered_B[image])
        drawn = answered - n_choose
        if drawn >= self.looks.at[-1] or (drawn > 0 and self._is_decided(image, drawn)):
            return range(0)
        return range(answered, n_choose + self.looks.next_after(max(drawn, 0)))

    def _is_decided(self, image: int, drawn: int) -> bool:
        chosen = int(self.counts_BHK[image, 0].argmax())
        if self.plan.stop_when_decided and chosen != int(self._labels_B[image]):
            return True  # the smoothed classifier is wrong here: no radius would count
        hits_1 = self.counts_BHK[image, 1, chosen][None]
        return bool(self.looks.decided(hits_1, drawn, self._thresholds_T))


def smoothed_votes(
    logits_of: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    labels_B: Tensor,
    plan: SmoothingPlan,
    *,
    n_classes: int,
    sample_ids: Sequence[int],
    seed: int,
    rows: int,
    n_kept: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Votes:
    """Draw until each image's certificates are decided or its draws are used up.

    Args:
        logits_of: logits (B, K) of images (B, C, H, W), in batches of its own fixed shape.
        labels_B: an image whose chosen class is another stops at its first look.
        rows: images of a batch.
        n_kept: of how many of the draws that choose the logits are kept.
        progress: called with the number of images that are decided.
    """
    tally = _Tally(plan, len(x_BCHW), n_classes, min(n_kept, plan.n_choose), labels_B)
    queue, n_decided, n_forward = deque((i, tally.next_draws(i)) for i in range(len(x_BCHW))), 0, 0
    while queue:
        batch = list(_take(queue, rows))
        x_NCHW = torch.cat(
            [noisy(x_BCHW[i], plan.sigma, seed, sample_ids[i], draws.start, draws.stop) for i, draws in batch]
        )
        logits_NK, at = logits_of(x_NCHW).cpu(), 0
        n_forward += len(x_NCHW)
        for i, draws in batch:
            tally.add(i, draws.start, logits_NK[at : at + len(draws)])
            at += len(draws)
            if queue and queue[0][0] == i:
                continue  # the rest of these draws is in the next batch
            if following := tally.next_draws(i):
                queue.append((i, following))
            else:
                n_decided += 1
                if progress is not None:
                    progress(n_decided)
    n_drawn_B = (tally.answered_B - plan.n_choose).int()
    return Votes(tally.counts_BHK[:, 0], tally.counts_BHK[:, 1], n_drawn_B, tally.logits_BNK, n_forward)


def _take(queue: deque[tuple[int, range]], rows: int) -> Iterator[tuple[int, range]]:
    """Draws for one batch off the queue's head; draws that do not fit stay at the head."""
    while queue and rows:
        i, draws = queue.popleft()
        taken, left = draws[:rows], draws[rows:]
        rows -= len(taken)
        if left:
            queue.appendleft((i, left))
        yield i, taken
