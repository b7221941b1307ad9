"""The smoothed mixed classifier, for which certificates hold: `(1 - a) s(x) + a P(rob(x + sigma z) = .)`.

The noise z is standard normal. The robust classifier votes with its predicted classes, so alpha is the only searched
parameter that matters here. The standard classifier sees the image once, without noise.

Shapes: B images of C x H x W, K classes.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..acceleration.batch_shape import BatchShape
from ..attacks.verification import Verifier, check_images
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..mixing.mixture import tempered_log_probs
from .certificates import radius_with_std
from .smoothing import ABSTAINS, SmoothingPlan, Votes, mixed_votes, smoothed_votes


@dataclass(frozen=True)
class CertifiedClasses:
    """The result of `SmoothedMixture.certify`."""

    classes: Tensor  # (B,) int64, `ABSTAINS` if nothing is certified
    radii: Tensor  # (B,) float64, in L2, units of the pixel range; 0 for an abstention


class SmoothedMixture(nn.Module):
    """A mixed classifier whose robust classifier votes under Gaussian noise, with certified L2 radii.

    For each image, the probability that a wrong class or a false radius is returned is at most 1 - `confidence`, for an
    image that was fixed before the noise was drawn. Each call therefore draws its noise from a new secret seed.

    Args:
        mixed: the two base classifiers and alpha.
        sigma: standard deviation of the noise, in units of the pixel range [0, 1].
        confidence: probability that the result of an image is right.
        n_choose: draws that choose a class, before those that bound its vote.
        rows: images per pass.

    Raises:
        InvalidInputError: if alpha is at most 1/2, or if sigma or the confidence is out of range.

    >>> rob = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).requires_grad_(False)
    >>> _ = rob[1].weight.copy_(torch.eye(2))
    >>> smoothed = SmoothedMixture(MixedClassifier(rob, rob, nn.Identity(), 0.9), sigma=0.25)
    >>> found = smoothed.certify(torch.tensor([1.0, 0.0, 0.5, 0.5]).view(2, 1, 1, 2), n=1000, seed=0)
    >>> found.classes, found.radii.round(decimals=1)  # clearly class 0; a tie
    (tensor([ 0, -1]), tensor([0.5000, 0.0000], dtype=torch.float64))
    """

    def __init__(
        self, mixed: MixedClassifier, *, sigma: float = 0.25, confidence: float = 0.999, n_choose: int = 100,
        rows: int = 256,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mixed, self.rows = mixed, rows
        self.plan = SmoothingPlan(sigma, n_choose, confidence, n_choose, (mixed.alpha,), (sigma,), False)
        self.eval()

    def predict(self, x_BCHW: Tensor, n: int = 1000, *, seed: int | None = None) -> Tensor:
        """Return the classes of the smoothed classifier, (B,); `ABSTAINS` if `n` draws do not settle the class.

        Args:
            x_BCHW: images in [0, 1].
            n: draws that bound the votes.
            seed: makes the result reproducible, and is then no longer secret; by default a new one from `secrets`.
        """
        votes = self._votes(x_BCHW, n, seed, None)
        classes_B = votes.settled_classes(self._std_BK(x_BCHW), replace(self.plan, n=n).looks, self.mixed.mixture)
        return classes_B.to(x_BCHW.device)

    def certify(
        self,
        x_BCHW: Tensor,
        n: int = 10_000,
        *,
        seed: int | None = None,
        sample_ids: Sequence[int] | None = None,
        std_radius_B: Tensor | None = None,
    ) -> CertifiedClasses:
        """Return classes and the L2 radii within which no perturbation changes them.

        Args:
            x_BCHW: images in [0, 1].
            n: draws that bound a vote, for every image.
            seed: as in `predict`; the seed of a run and `sample_ids` repeat the noise of its certify stage, on the same
                kind of device.
            sample_ids: the numbers of the images in their dataset; by default their positions in the batch.
            std_radius_B: the L2 radius up to which the standard classifier is certified to keep its class, per image, 0
                for none. The radius must not be a statistical bound, because the errors of two such bounds add up.
        """
        votes = self._votes(x_BCHW, n, seed, sample_ids)
        classes_B, radius_B = votes.classes, torch.zeros(len(x_BCHW), dtype=torch.float64)
        if std_radius_B is not None:
            if self.mixed.mixture.temperature > 0:
                raise InvalidInputError("std_radius_B needs temperature 0: other votes are not one-hot")
            if std_radius_B.shape != radius_B.shape:
                raise InvalidInputError(f"std_radius_B has shape {tuple(std_radius_B.shape)}. Give one per image")
            std_BK, known_B = self._std_BK(x_BCHW), std_radius_B.cpu() > 0
            mixed_B = mixed_votes(std_BK, votes.chosen_counts_BK, self.mixed.mixture).argmax(dim=1)
            classes_B = torch.where(known_B, mixed_B, classes_B)  # chosen before the draws that bound its vote
            radius_B = torch.where(known_B & (std_BK.argmax(dim=1) == classes_B), std_radius_B.cpu().double(), 0.0)
        bounds = replace(self.plan, n=n).looks.vote_bounds(votes.counts_BK, classes_B)
        radii_B = radius_with_std(*bounds, radius_B, sigma=self.plan.sigma, alpha=self.mixed.alpha)
        held_B = radii_B > 0
        classes_B, radii_B = torch.where(held_B, classes_B, ABSTAINS), torch.where(held_B, radii_B, 0.0)
        return CertifiedClasses(classes_B.to(x_BCHW.device), radii_B.to(x_BCHW.device))

    def extra_repr(self) -> str:
        return f"sigma={self.plan.sigma:g}, confidence={self.plan.confidence:g}"

    def _std_BK(self, x_BCHW: Tensor) -> Tensor:  # noqa: N802
        logits_BK = self._logits(self.mixed.std, x_BCHW).double()
        return tempered_log_probs(logits_BK, self.mixed.mixture.temperature).exp().cpu()

    @torch.no_grad()
    def _votes(self, x_BCHW: Tensor, n: int, seed: int | None, sample_ids: Sequence[int] | None) -> Votes:
        unused_B = torch.zeros(len(x_BCHW), dtype=torch.int64)  # labels only matter for early stops
        check_images(x_BCHW, unused_B)
        ids = range(len(x_BCHW)) if sample_ids is None else sample_ids
        if len(ids) != len(x_BCHW):
            raise InvalidInputError(f"{len(ids)} sample_ids for {len(x_BCHW)} images. Give one per image")
        n_classes = self._logits(self.mixed.rob, x_BCHW[:1]).shape[1]
        return smoothed_votes(
            lambda noisy: self._logits(self.mixed.rob, noisy), x_BCHW, unused_B, replace(self.plan, n=n),
            n_classes=n_classes, sample_ids=ids, seed=secrets.randbits(128) if seed is None else seed, rows=self.rows,
        )  # fmt: skip

    def _logits(self, model: nn.Module, x_BCHW: Tensor) -> Tensor:
        return Verifier(model, BatchShape(self.rows)).logits(x_BCHW)
