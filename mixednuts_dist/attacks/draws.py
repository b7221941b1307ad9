"""Expectation over transformation (EOT) for random classifiers (Athalye et al. 2018).

A pass holds n rows per image, one per draw of the classifier's randomness. An attack maximizes the mean of the draws'
losses. During the search, a point counts as misclassified if the mean of the draws' probabilities is largest for
another class than the label. At the clean image and at the best point, `N_DECISION` fresh draws decide: the image is
broken if at least half of them are misclassified.

A classifier may have a method `forward_with_seeds(x_BCHW, seeds_B)`, with int64 seeds, which replaces `forward`. The
seeds are hashes of the seed of the call, the pixels, the purpose of the draw and its number, so results do not depend
on partition or order. Without this method, the classifier draws from its own generator, and results do not repeat.

Shapes: B images of C x H x W, n draws, K classes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, PassSizes, in_one_shape
from ..acceleration.tf32 import tf32_allowed
from ..mixing.classifier import MixedClassifier
from ..norms.random import hashed, key_number, keys_of
from .gradient_model import AttackMode, MixedOutputs, Outputs

GRADIENT, VERIFICATION, DECISION = range(3)  # what draws are for; each purpose has its own
N_DECISION = 100  # draws per decision


class Draws:
    """Evaluates n draws of a classifier per image; a call returns the logarithms of the mean probabilities.

    Example:
        >>> draws = Draws(lambda x: x.flatten(1)[:, :3], 4, seed=0)
        >>> draws(torch.zeros(2, 3, 1, 1)).exp().sum(dim=1).allclose(torch.ones(2))
        True
    """

    def __init__(self, model: Callable[[Tensor], Tensor], n: int, seed: int, mode: AttackMode = "transfer") -> None:
        self.model, self.n, self._seed, self._mode = model, n, seed, mode

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor) -> Tensor:
        return _log_mean(self.outputs(x_BCHW, VERIFICATION)).float()

    def climb(self, x_BCHW: Tensor) -> Outputs:
        """Return the logarithms of the mean probabilities, with the draws whose losses an attack averages."""
        draws = self.outputs(x_BCHW, GRADIENT)
        expected = Outputs(_log_mean(draws))
        expected.draws = draws
        return expected

    def outputs(self, x_BCHW: Tensor, use: int, first: int = 0) -> list[Outputs]:
        """Return the draws `first` .. `first + n - 1`."""
        rows = x_BCHW.repeat(self.n, *[1] * (x_BCHW.dim() - 1))
        keys_B = keys_of(x_BCHW.detach(), key_number(self._seed, use))
        seeds = (hashed(keys_B, first, self.n) & torch.iinfo(torch.int64).max).t().flatten()  # (n B,), at least 0
        if isinstance(self.model, MixedClassifier):
            std, rob = (_drawn(part, rows, seeds).chunk(self.n) for part in (self.model.std, self.model.rob))
            return [MixedOutputs(self.model, self._mode, *both) for both in zip(std, rob, strict=True)]
        return [Outputs(logits) for logits in _drawn(self.model, rows, seeds).chunk(self.n)]


def misclassified(draws: Draws, x_BCHW: Tensor, y_B: Tensor, *, rows: int) -> Tensor:
    """Return whether at least half of the fresh draws misclassify each image, (B,) bool on the host."""
    return misclassified_share(draws, x_BCHW, y_B, rows=rows).cpu() >= 0.5


@torch.no_grad()
def misclassified_share(draws: Draws, x_BCHW: Tensor, y_B: Tensor, *, rows: int) -> Tensor:
    """Return the share of `N_DECISION` fresh draws that misclassify each image, (B,) float64, `rows` per pass."""

    def share(i: Tensor) -> Tensor:
        wrong: list[Tensor] = []
        for first in range(0, N_DECISION, draws.n):
            with tf32_allowed(False):
                seen = draws.outputs(x_BCHW[i], DECISION, first)
            wrong += [each.model_logits.argmax(dim=1) != y_B[i] for each in seen]
        return torch.stack(wrong[:N_DECISION]).double().mean(dim=0)

    return in_one_shape(share, torch.arange(len(x_BCHW), device=x_BCHW.device), PassSizes(BatchShape(rows), None))


def _drawn(part: Any, rows: Tensor, seeds: Tensor) -> Tensor:
    seeded = getattr(part, "forward_with_seeds", None)
    logits: Tensor = part(rows) if seeded is None else seeded(rows, seeds)
    return logits


def _log_mean(draws: Sequence[Outputs]) -> Tensor:
    """Return the log of the mean of the probabilities, (B, K)."""
    each = torch.stack([draw.model_logits.double().log_softmax(dim=1) for draw in draws])
    return each.logsumexp(dim=0) - math.log(len(each))
