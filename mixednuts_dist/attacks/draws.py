"""Expectation over transformation (EOT) for random classifiers (Athalye et al. 2018).

A pass holds n rows per image, one per draw of the classifier's randomness. An attack maximizes the mean of the draws'
losses, and sends a point to verification if the mean of their probabilities is largest for another class than the
label. There, and for the clean image, `N_DECISION` other draws decide: the image is broken if at least half of them are
misclassified.

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

from ..acceleration.batch_shape import BatchShape, PassSizes, as_out_of_memory, in_one_shape
from ..acceleration.tf32 import tf32_allowed
from ..mixing.classifier import MixedClassifier
from ..mixing.margins import log_one_minus_signed_margin
from ..norms.random import hashed, key_number, keys_of
from .gradient_model import AttackMode, MixedOutputs, Outputs
from .verification import Verified, Verifier

GRADIENT, DECISION = range(2)  # what draws are for; each purpose has its own
N_DECISION = 100  # draws per decision


class Draws:
    """Evaluates n draws of a classifier per image."""

    def __init__(self, model: Callable[[Tensor], Tensor], n: int, seed: int, mode: AttackMode = "transfer") -> None:
        self.model, self.n, self._seed, self._mode = model, n, seed, mode

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


class DrawsVerifier(Verifier):
    """Verifies an image with `N_DECISION` draws: it is misclassified if at least half of them are."""

    def __init__(self, draws: Draws, shape: BatchShape) -> None:
        super().__init__(draws.model, shape)
        self.draws, self.n_passes = draws, math.ceil(N_DECISION / draws.n)

    def verify(self, x_BCHW: Tensor, labels_B: Tensor) -> Verified:
        logits_BK, share_B = _decision(self.draws, x_BCHW, labels_B, self.sizes)
        return Verified(logits_BK, log_one_minus_signed_margin(logits_BK, labels_B.cpu()), share_B >= 0.5)


def misclassified_share(draws: Draws, x_BCHW: Tensor, y_B: Tensor, *, rows: int) -> Tensor:
    """Return the share of `N_DECISION` draws that misclassify each image, (B,) float64, `rows` images per pass."""
    return _decision(draws, x_BCHW, y_B, PassSizes(BatchShape(rows), None))[1]


@torch.no_grad()
def _decision(draws: Draws, x_BCHW: Tensor, y_B: Tensor, sizes: PassSizes) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the draws' mean probabilities, (B, K), and the misclassified shares, on the host."""

    def seen(i: Tensor) -> Tensor:
        with tf32_allowed(False), as_out_of_memory():
            each = [draw for n in range(0, N_DECISION, draws.n) for draw in draws.outputs(x_BCHW[i], DECISION, n)]
        wrong = [draw.model_logits.argmax(dim=1) != labels_B[i] for draw in each[:N_DECISION]]
        return torch.cat([_log_mean(each[:N_DECISION]), torch.stack(wrong).double().mean(dim=0)[:, None]], dim=1)

    labels_B, indices = y_B.to(x_BCHW.device), torch.arange(len(x_BCHW), device=x_BCHW.device)
    found = in_one_shape(seen, indices, sizes).cpu()
    return found[:, :-1].float(), found[:, -1]


def _drawn(part: Any, rows: Tensor, seeds: Tensor) -> Tensor:
    seeded = getattr(part, "forward_with_seeds", None)
    logits: Tensor = part(rows) if seeded is None else seeded(rows, seeds)
    return logits


def _log_mean(draws: Sequence[Outputs]) -> Tensor:
    """Return the log of the mean of the probabilities, (B, K)."""
    each = torch.stack([draw.model_logits.double().log_softmax(dim=1) for draw in draws])
    return each.logsumexp(dim=0) - math.log(len(each))
