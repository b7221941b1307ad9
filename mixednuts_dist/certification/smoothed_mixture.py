"""The classifier that certificates by smoothing speak of: `(1 - a) onehot(std(x)) + a E onehot(rob(x + sigma z))`.

M is inside the expectation, and it keeps rob's class, so hard votes do not depend on s, p and c: of a searched mixture
alpha alone matters here. Std sees the image itself, once.

Shapes: B images of C x H x W, K classes.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.batch_shape import BatchShape
from ..attacks.hashing import image_key
from ..attacks.judge import Judge, check_images
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.mixture import tempered_log_probs
from .certificates import certified_radius, cutoff_of
from .confidence import lower_bound, upper_bound
from .smoothing import SmoothingPlan, Votes, smoothed_votes

ABSTAINS = -1  # in place of a class


@dataclass(frozen=True)
class CertifiedClasses:
    """What `SmoothedMixture.certify` says of each image; each is right with the plan's confidence."""

    classes: Tensor  # (B,) int64, `ABSTAINS` where nothing is certified
    radii: Tensor  # (B,) float64, in L2, units of the pixel range; 0 where it abstains


class SmoothedMixture(nn.Module):
    """A mixed classifier whose rob answers by votes under Gaussian noise, with certified L2 radii.

    The noise of a draw depends on `seed`, the image and the draw's number alone: on the image's bytes or, where
    `sample_ids` are given, on these, as in the certify stage. So answers do not change with the batch, and the same
    image gets the same answer again; an adversary who can predict the noise is why `predict` may abstain.

    Args:
        mixed: the two base classifiers and alpha.
        sigma: standard deviation of the noise, in units of the pixel range.
        confidence: of each image's answer.
        n_choose: draws that choose a class, before those that bound its vote.
        rows: images of a pass.

    Raises:
        InvalidInputError: for alpha up to 1/2 (std alone decides), or a sigma or confidence out of range.

    >>> rob = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).requires_grad_(False)
    >>> _ = rob[1].weight.copy_(torch.eye(2))
    >>> smoothed = SmoothedMixture(MixedClassifier(rob, rob, nn.Identity(), 0.9), sigma=0.25)
    >>> found = smoothed.certify(torch.tensor([1.0, 0.0, 0.5, 0.5]).view(2, 1, 1, 2), n=1000)
    >>> found.classes, found.radii.round(decimals=2)  # surely class 0; a tie
    (tensor([ 0, -1]), tensor([0.5500, 0.0000], dtype=torch.float64))
    """

    def __init__(
        self, mixed: MixedClassifier, *, sigma: float = 0.25, confidence: float = 0.999, n_choose: int = 100,
        seed: int = 0, rows: int = 256,
    ) -> None:  # fmt: skip
        super().__init__()
        cutoff_of(mixed.alpha)
        self.mixed, self.seed, self.rows = mixed, seed, rows
        self.plan = SmoothingPlan(sigma, n_choose, confidence, n_choose, (mixed.alpha,), (sigma,), False)
        _ = self.plan.looks, self.plan.thresholds  # raise for a confidence or sigma out of range
        self.eval()

    @classmethod
    def from_run(
        cls, uri: str, beta: float | None = None, *, trust_code: bool = False, **noise: Any
    ) -> "SmoothedMixture":
        """What a run with `certify: {sigma: ...}` certifies: its mixture at `beta`, its noise and its seed.

        Args:
            uri, beta, trust_code: as in `MixedClassifier.from_run`, and so are the errors.
            noise: `sigma`, `confidence`, `n_choose`, `seed` or `rows` in place of the run's.

        Raises:
            InvalidInputError: where neither the run nor `noise` has a sigma.
        """
        loading = importlib.import_module("..deployment.loading", __package__)
        loaded: SmoothedMixture = loading.load_smoothed(uri, beta, trust_code=trust_code, **noise)
        return loaded

    def predict(self, x_BCHW: Tensor, n: int = 1000, *, sample_ids: Sequence[int] | None = None) -> Tensor:
        """The smoothed mixture's classes, (B,), `ABSTAINS` where `n` draws do not settle which class it is.

        The class with the most mixed votes is chosen on the first draws. It is given out where, by bounds of its vote
        from below and of all others from above that hold together, `(1 - a) s_w + a q_w` leads every other class.
        """
        votes = self._votes(x_BCHW, n, sample_ids)
        std_BK = tempered_log_probs(self._logits(self.mixed.std, x_BCHW).double(), self.mixed.temperature).exp().cpu()
        shares_BK = votes.chosen_counts_BK.double() / self.plan.n_choose
        alpha, std_part_BK = self.mixed.alpha, self.mixed.one_minus_alpha * std_BK
        chosen_B1 = (std_part_BK + alpha * shares_BK).argmax(dim=1, keepdim=True)
        error = (1 - self.plan.confidence) / shares_BK.shape[1]
        low_BK = std_part_BK + alpha * lower_bound(votes.counts_BK, n, error)
        high_BK = std_part_BK + alpha * upper_bound(votes.counts_BK, n, error)
        rivals_B1 = high_BK.scatter(1, chosen_B1, -torch.inf).amax(dim=1, keepdim=True)
        return torch.where(low_BK.gather(1, chosen_B1) > rivals_B1, chosen_B1, ABSTAINS).squeeze(1).to(x_BCHW.device)

    def certify(self, x_BCHW: Tensor, n: int = 10_000, *, sample_ids: Sequence[int] | None = None) -> CertifiedClasses:
        """Classes and L2 radii within which nothing changes them, whatever std answers.

        Args:
            x_BCHW: images in [0, 1].
            n: draws that bound a vote, all of them for every image.
            sample_ids: of the images in their data set, for the noise of the certify stage.
        """
        votes = self._votes(x_BCHW, n, sample_ids)
        p_top_B = self._plan(n).looks.lower_bounds(votes.hits, votes.n_drawn_B)
        radii_B = certified_radius(p_top_B, sigma=self.plan.sigma, alpha=self.mixed.alpha)
        held_B = radii_B > 0
        classes_B, radii_B = torch.where(held_B, votes.classes, ABSTAINS), torch.where(held_B, radii_B, 0.0)
        return CertifiedClasses(classes_B.to(x_BCHW.device), radii_B.to(x_BCHW.device))

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        """Refused: files hold the mixture of one pass, and what is certified is the average of many."""
        raise InvalidInputError(
            f"a smoothed mixture is not written to {folder}: an exported or served mixture answers from one pass, and "
            "these certificates do not speak of it. Save `.mixed`, and put SmoothedMixture around it where it is loaded"
        )

    def extra_repr(self) -> str:
        return f"sigma={self.plan.sigma:g}, confidence={self.plan.confidence:g}, seed={self.seed}"

    def _plan(self, n: int) -> SmoothingPlan:
        return replace(self.plan, n=n)

    @torch.no_grad()
    def _votes(self, x_BCHW: Tensor, n: int, sample_ids: Sequence[int] | None) -> Votes:
        wrong_B = torch.zeros(len(x_BCHW), dtype=torch.int64)  # labels matter to early stops alone, and there are none
        check_images(x_BCHW, wrong_B)
        if sample_ids is None:
            sample_ids = [image_key(image.cpu().contiguous().numpy().tobytes()) for image in x_BCHW]
        if len(sample_ids) != len(x_BCHW):
            raise InvalidInputError(f"{len(sample_ids)} sample_ids for {len(x_BCHW)} images; give one for each")
        n_classes = self._logits(self.mixed.rob, x_BCHW[:1]).shape[1]
        return smoothed_votes(
            lambda noisy: self._logits(self.mixed.rob, noisy), x_BCHW, wrong_B, self._plan(n), n_classes=n_classes,
            sample_ids=sample_ids, seed=self.seed, rows=self.rows,
        )  # fmt: skip

    def _logits(self, model: nn.Module, x_BCHW: Tensor) -> Tensor:
        return Judge(model, BatchShape(self.rows)).logits(x_BCHW)
