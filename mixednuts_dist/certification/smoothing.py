"""Count the votes of a classifier under Gaussian noise, until no further draw can change a certificate.

Draw d of an image is its pixels plus sigma times noise that depends on the seed, the image's id and d alone, so votes
do not depend on the partition, the order or the batch composition. The first `n_choose` draws choose the class, and
later draws bound its vote, because the class must not be chosen by the draws that certify it.

A look is a check after a fixed number of draws (`confidence.py`). All undecided images get their draws up to the next
look, in batches that hold draws of several images. Only the last batch of each look is padded.

Shapes: B images of C x H x W, N draws, K classes, Q questions.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..mixing.mixture import Mixture
from .certificates import needed_margin, vote_needed
from .confidence import Looks, lower_bound, top_and_second, upper_bound

ABSTAINS = -1  # instead of a class
_BLOCK = 16  # draws per generator, because creating a generator costs as much as a few hundred random numbers


@dataclass(frozen=True)
class SmoothingPlan:
    """The noise, the draws per image, and the questions that the draws have to answer."""

    sigma: float
    n: int  # draws that bound the vote, at most
    confidence: float
    n_choose: int  # earlier draws, which choose the class
    alphas: tuple[float, ...]
    radii: tuple[float, ...]
    stop_when_decided: bool = True

    @property
    def looks(self) -> Looks:
        """The numbers of draws at which an image may stop."""
        return (Looks.of if self.stop_when_decided else Looks.one)(self.n, self.confidence)

    @property
    def least_vote(self) -> float:
        """The vote above which an image is certified at the largest alpha and the smallest radius."""
        return vote_needed(min(self.radii), sigma=self.sigma, alpha=max(self.alphas))

    @property
    def questions(self) -> tuple[Tensor, Tensor]:
        """The margin to exceed and the distance (in standard deviations) per alpha and radius, each (Q,) float64."""
        asked = [(needed_margin(alpha), radius / self.sigma) for alpha in self.alphas for radius in self.radii]
        needed_Q, distance_Q = torch.tensor(asked, dtype=torch.float64).unbind(dim=1)
        return needed_Q, distance_Q


@dataclass(frozen=True)
class Votes:
    """The votes of some images, in CPU memory."""

    chosen_counts_BK: Tensor  # int32, of the draws that choose
    counts_BK: Tensor  # int32, of the draws that bound
    n_drawn_B: Tensor  # int32, the number of draws that bound
    n_forward: int  # passes of all draws

    @property
    def classes(self) -> Tensor:
        """The class with the most votes among the draws that choose, (B,)."""
        return self.chosen_counts_BK.argmax(dim=1)


def settled_classes(
    std_BK: Tensor, chosen_counts_BK: Tensor, counts_BK: Tensor, n_drawn_B: Tensor, looks: Looks, mixture: Mixture
) -> Tensor:
    """Return the classes of the smoothed classifier, (B,); `ABSTAINS` if the draws do not settle the class.

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


@torch.no_grad()
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
) -> Votes:
    """Draw until each image's certificates are decided or its draws are used up.

    Args:
        logits_of: logits (B, K) of images (B, C, H, W), in batches of one fixed shape.
        labels_B: with `plan.stop_when_decided`, an image whose chosen class is not its label stops at its first look.
        rows: images per batch.
    """
    looks, questions, labels_B = plan.looks, plan.questions, labels_B.cpu()
    counts_BHK = torch.zeros(len(x_BCHW), 2, n_classes, dtype=torch.int32)  # H: draws that choose, that bound
    n_drawn_B, open_B, start = torch.zeros(len(x_BCHW), dtype=torch.int32), torch.arange(len(x_BCHW)), 0
    for look in looks.at:
        stop = plan.n_choose + look
        for batch in _batches(open_B.tolist(), range(start, stop), rows):
            x_NCHW = [noisy(x_BCHW[i], plan.sigma, seed, sample_ids[i], each.start, each.stop) for i, each in batch]
            classes_N = logits_of(torch.cat(x_NCHW)).argmax(dim=1).cpu()
            index_N2 = torch.tensor([(i, int(draw >= plan.n_choose)) for i, each in batch for draw in each])
            one = torch.ones((), dtype=torch.int32)
            counts_BHK.index_put_((index_N2[:, 0], index_N2[:, 1], classes_N), one, accumulate=True)
        n_drawn_B[open_B], start = look, stop
        chosen_B = counts_BHK[open_B, 0].argmax(dim=1)
        decided_B = looks.decided(*top_and_second(counts_BHK[open_B, 1], chosen_B), look, n_classes, questions)
        if plan.stop_when_decided:  # no radius counts if the smoothed classifier is wrong
            decided_B |= chosen_B != labels_B[open_B]
        open_B = open_B[~decided_B]
    return Votes(counts_BHK[:, 0], counts_BHK[:, 1], n_drawn_B, int(n_drawn_B.sum()) + plan.n_choose * len(x_BCHW))


def _batches(images: Sequence[int], draws: range, rows: int) -> Iterator[list[tuple[int, range]]]:
    """Yield batches of `rows` draws, and at the end a smaller one; a batch lists images with consecutive draws."""
    batch, room = list[tuple[int, range]](), rows
    for image in images:
        left = draws
        while left:
            taken, left = left[:room], left[room:]
            batch.append((image, taken))
            room -= len(taken)
            if not room:
                yield batch
                batch, room = [], rows
    if batch:
        yield batch
