"""Float32 verification, which decides every stored margin and whether an image is broken.

The classifier itself, not a fast copy, computes the logits in float32, with TF32 off, in one batch shape. The host
computes margins from these logits in float64. Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, PassSizes, as_out_of_memory, in_one_shape
from ..acceleration.tf32 import tf32_allowed
from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_signed_margin


@dataclass(frozen=True)
class Verified:
    """Verified results of images, on the host."""

    logits: Tensor  # (B, K) float32
    log1m_margin: Tensor  # (B,) float64, log(1 - signed margin)
    wrong: Tensor  # (B,) bool, misclassified


class Verifier:
    """Verifies images with one classifier.

    Example:
        >>> verifier = Verifier(lambda x: x.flatten(1)[:, :3], BatchShape(8))
        >>> verifier.verify(torch.tensor([0.1, 0.9, 0.2]).view(1, 3, 1, 1), torch.tensor([1])).wrong
        tensor([False])
    """

    n_passes = 1  # forward passes per verification of an image

    def __init__(self, model: Callable[[Tensor], Tensor], shape: BatchShape) -> None:
        self.model = model
        self.sizes = PassSizes(shape.float32, lambda x_BCHW: (self._pass(x_BCHW),))

    def logits(self, x_BCHW: Tensor) -> Tensor:
        """Return the classifier's float32 logits, (B, K), on the device of the images."""
        return in_one_shape(self._pass, x_BCHW, self.sizes)

    def verify(self, x_BCHW: Tensor, labels_B: Tensor) -> Verified:
        """Return whether each image is misclassified, and its margin."""
        logits_BK, labels_B = self.logits(x_BCHW).cpu(), labels_B.cpu()
        log1m_margin_B = log_one_minus_signed_margin(logits_BK, labels_B)
        return Verified(logits_BK, log1m_margin_B, logits_BK.argmax(dim=1) != labels_B)

    @torch.no_grad()
    def _pass(self, x_BCHW: Tensor) -> Tensor:
        with tf32_allowed(False), as_out_of_memory():
            return self.model(x_BCHW).float()


def check_images(x_BCHW: Tensor, y_B: Tensor) -> None:
    """Reject images and labels that do not fit each other, and images outside [0, 1]."""
    if x_BCHW.dim() != 4 or y_B.shape != x_BCHW.shape[:1]:
        shapes = f"images of shape {tuple(x_BCHW.shape)} and labels of shape {tuple(y_B.shape)}"
        raise InvalidInputError(f"{shapes} do not fit: give images (B, C, H, W) and labels (B,)")
    if not x_BCHW.is_floating_point():
        raise InvalidInputError(f"images are {x_BCHW.dtype}; give float32 in [0, 1] (divide uint8 by 255)")
    if not len(x_BCHW):
        raise InvalidInputError("there is no image to attack: the batch is empty")
    low, high = x_BCHW.min().item(), x_BCHW.max().item()
    if not (low >= 0 and high <= 1):
        raise InvalidInputError(
            f"images range over [{low:g}, {high:g}]; give them in [0, 1], with normalization inside the model"
        )
