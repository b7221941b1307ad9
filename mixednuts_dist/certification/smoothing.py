"""Votes of a classifier under Gaussian noise, with draws only where they can still change a certificate.

Draw d of an image is its pixels plus sigma times noise that depends on the seed, the image's id and d alone, so votes
do not depend on the partition, the order or the company of images. The first `n_choose` draws choose the class, and the
later ones bound its vote: the class must not be chosen on the draws that certify it.

A batch holds draws of several images: it is filled from a queue of images, each with its draws up to its next look, and
an image that is not decided there joins the queue again. Only the last batch is padded.

Shapes: B images of C x H x W, N draws, K classes, Q questions.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..mixing.mixture import Mixture
from .certificates import needed_margin, vote_needed
from .confidence import Looks, lower_bound, top_and_second, upper_bound

ABSTAINS = -1  # instead of a class
_BLOCK = 16  # draws per generator: making one costs as much as a few hundred random numbers


@dataclass(frozen=True)
class SmoothingPlan:
    """The noise, the draws per image, and the questions that the draws have to answer."""

    sigma: float
    n: int  # draws that bound the vote, at most
    confidence: float
    n_choose: int  # draws that choose the class, before them
    alphas: tuple[float, ...]
    radii: tuple[float, ...]
    stop_when_decided: bool = True

    @property
    def looks(self) -> Looks:
        """The numbers of draws at which an image may stop."""
        return (Looks.of if self.stop_when_decided else Looks.one)(self.n, self.confidence)

    @property
    def least_vote(self) -> float:
        """The vote above which the mixture is certified at the largest alpha and the smallest radius."""
        return vote_needed(min(self.radii), sigma=self.sigma, alpha=max(self.alphas))

    @property
    def questions(self) -> tuple[Tensor, Tensor]:
        """The margins that must be exceeded, and at what distance in standard deviations, each (Q,) float64."""
        asked = [(needed_margin(alpha), radius / self.sigma) for alpha in self.alphas for radius in self.radii]
        needed_Q, distance_Q = torch.tensor(asked, dtype=torch.float64).unbind(dim=1)
        return needed_Q, distance_Q


@dataclass(frozen=True)
class Votes:
    """The votes of some images, on the host."""

    chosen_counts_BK: Tensor  # int32, of the draws that choose
    counts_BK: Tensor  # int32, of the draws that bound
    n_drawn_B: Tensor  # int32, of those
    n_forward: int

    @property
    def classes(self) -> Tensor:
        """The class with the most votes among the draws that choose, (B,)."""
        return self.chosen_counts_BK.argmax(dim=1)


def settled_classes(
    std_BK: Tensor, chosen_counts_BK: Tensor, counts_BK: Tensor, n_drawn_B: Tensor, looks: Looks, mixture: Mixture
) -> Tensor:
    """Return the classes of the smoothed mixture, (B,); `ABSTAINS` where the draws do not settle the class.

    The first draws choose the class with the most mixed votes. It is returned if the lower bound of its mixed vote is
    above the upper bounds of all other classes. These K bounds hold together: each has 1/K of the error.

    Args:
        std_BK: probabilities of the standard classifier.
        chosen_counts_BK, counts_BK: votes among the draws that choose, and among those that bound.
        n_drawn_B: the number of the latter.
    """
    alpha, std_part_BK = mixture.alpha, mixture.one_minus_alpha * std_BK
    shares_BK = chosen_counts_BK.double() / chosen_counts_BK.sum(dim=1, keepdim=True)
    chosen_B1 = (std_part_BK + alpha * shares_BK).argmax(dim=1, keepdim=True)
    errors_B1, n_drawn_B1 = looks.errors_at(n_drawn_B)[:, None] / counts_BK.shape[1], n_drawn_B[:, None]
    low_BK = std_part_BK + alpha * lower_bound(counts_BK, n_drawn_B1, errors_B1)
    high_BK = std_part_BK + alpha * upper_bound(counts_BK, n_drawn_B1, errors_B1)
    rivals_B1 = high_BK.scatter(1, chosen_B1, -torch.inf).amax(dim=1, keepdim=True)
    return torch.where(low_BK.gather(1, chosen_B1) > rivals_B1, chosen_B1, ABSTAINS).squeeze(1)


def noisy(x_CHW: Tensor, sigma: float, seed: int, sample_id: int, start: int, stop: int) -> Tensor:
    """Return the noisy images of draws `start` to `stop` of an image, (N, C, H, W).

    The noise is made on the image's device: the bits agree between devices of one kind.
    """
    first, last = start // _BLOCK, (stop - 1) // _BLOCK
    blocks = [_noise_block(x_CHW, f"certify/{seed}/{sample_id}/{block}") for block in range(first, last + 1)]
    rows = torch.cat(blocks)[start - first * _BLOCK : stop - first * _BLOCK]
    return x_CHW + sigma * rows


def _noise_block(x_CHW: Tensor, name: str) -> Tensor:
    key, shape = hashlib.sha256(name.encode()).digest(), (_BLOCK, *x_CHW.shape)
    if x_CHW.device.type == "cpu":  # torch's generator on a CPU uses only 32 bits of its seed
        philox = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
        return torch.from_numpy(philox.standard_normal(shape, dtype=np.float32))
    generator = torch.Generator(x_CHW.device).manual_seed(int.from_bytes(key[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, device=x_CHW.device, dtype=torch.float32)


class _Tally:
    """The votes of all images so far, on the host, and which draws each needs next."""

    def __init__(self, plan: SmoothingPlan, n_images: int, n_classes: int, labels_B: Tensor) -> None:
        self.plan, self.looks, self._labels_B = plan, plan.looks, labels_B.cpu()
        self._questions = plan.questions
        self.counts_BHK = torch.zeros(n_images, 2, n_classes, dtype=torch.int32)  # H: draws that choose, that bound
        self.answered_B = torch.zeros(n_images, dtype=torch.int64)

    def add(self, image: int, start: int, logits_NK: Tensor) -> None:
        """The answers to draws `start`, `start + 1`, ... of an image."""
        n_choose, classes_N = self.plan.n_choose, logits_NK.argmax(dim=1)
        choosing = max(0, min(len(classes_N), n_choose - start))
        for half, votes in enumerate((classes_N[:choosing], classes_N[choosing:])):
            self.counts_BHK[image, half] += votes.bincount(minlength=logits_NK.shape[1]).int()
        self.answered_B[image] += len(classes_N)

    def next_draws(self, image: int) -> range:
        """The draws up to the image's next look; none where it is decided."""
        n_choose, answered = self.plan.n_choose, int(self.answered_B[image])
        drawn = answered - n_choose
        if drawn >= self.looks.at[-1] or (drawn > 0 and self._is_decided(image, drawn)):
            return range(0)
        return range(answered, n_choose + self.looks.next_after(max(drawn, 0)))

    def _is_decided(self, image: int, drawn: int) -> bool:
        chosen_1 = self.counts_BHK[image, 0].argmax()[None]
        if self.plan.stop_when_decided and int(chosen_1) != int(self._labels_B[image]):
            return True  # the smoothed classifier is wrong here, so no radius would count
        top_1, second_1 = top_and_second(self.counts_BHK[image, 1][None], chosen_1)
        return bool(self.looks.decided(top_1, second_1, drawn, self.counts_BHK.shape[2], self._questions))


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
    progress: Callable[[int], None] | None = None,
) -> Votes:
    """Draw until each image's certificates are decided or its draws are used up.

    Args:
        logits_of: logits (B, K) of images (B, C, H, W), in batches of its own fixed shape.
        labels_B: an image whose chosen class is another stops at its first look.
        rows: images of a batch.
        progress: called with the number of images that are decided.
    """
    tally = _Tally(plan, len(x_BCHW), n_classes, labels_B)
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
    return Votes(tally.counts_BHK[:, 0], tally.counts_BHK[:, 1], n_drawn_B, n_forward)


def _take(queue: deque[tuple[int, range]], rows: int) -> Iterator[tuple[int, range]]:
    """Draws for one batch off the queue's head; draws that do not fit stay at the head."""
    while queue and rows:
        i, draws = queue.popleft()
        taken, left = draws[:rows], draws[rows:]
        rows -= len(taken)
        if left:
            queue.appendleft((i, left))
        yield i, taken
