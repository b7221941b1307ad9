"""The inputs of Algorithm 1: the stored logits of a run, checked and LayerNormed once for all candidates.

Shapes: B images, K classes, P adversarial examples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.clamps import Clamp, size_at_turn
from ..mixing.margins import require_logits
from ..mixing.transforms import norm_statistics, resolve_ln_k
from .kernel import sort_rows


@dataclass(frozen=True)
class AttackedPoints:
    """Adversarial examples of images, one per row.

    The margin of an image is the smallest one over all its adversarial examples. If the robust classifier is correct at
    an example and the standard classifier is not, the margin there is the lead of the label over the class of the
    standard classifier. Otherwise it is the signed margin, which holds for any class of the standard classifier.
    """

    rob_logits_PK: Tensor  # raw logits of the robust classifier
    image_P: Tensor  # int64: the row of the image in the tables with one row per image
    std_pred_P: Tensor  # int64: classes of the standard classifier; if one is the label, the signed margin is used

    @classmethod
    def one_per_image(cls, rob_logits_BK: Tensor, labels_B: Tensor) -> "AttackedPoints":
        """Return one example of each image, with signed margins."""
        return cls(rob_logits_BK, torch.arange(len(rob_logits_BK), device=labels_B.device), labels_B)

    def __len__(self) -> int:
        return len(self.image_P)

    def joined(self, other: "AttackedPoints") -> "AttackedPoints":
        """Return these examples, followed by the others."""
        return AttackedPoints(
            torch.cat([self.rob_logits_PK, other.rob_logits_PK]),
            torch.cat([self.image_P, other.image_P]),
            torch.cat([self.std_pred_P, other.std_pred_P]),
        )

    def of_images(self, mask_B: Tensor) -> "AttackedPoints":
        """Return the examples of the images where `mask_B` is true, with rows counted among those images."""
        mine_P, row_B = mask_B[self.image_P], mask_B.long().cumsum(0) - 1
        return AttackedPoints(self.rob_logits_PK[mine_P], row_B[self.image_P[mine_P]], self.std_pred_P[mine_P])


@dataclass(frozen=True)
class CachedLogits:
    """All inputs of a search and of its predictions; row i of every table is image i."""

    rob_clean_BK: Tensor
    rob_attacked_BK: Tensor
    labels_B: Tensor
    std_pred_B: Tensor  # classes of the standard classifier on the clean images
    # Adversarial examples that refinement rounds found on mixed classifiers; None for a search without rounds.
    points: AttackedPoints | None = None

    def examples(self) -> AttackedPoints:
        """Return all adversarial examples: those of `rob_attacked_BK`, one per image, followed by `points`."""
        first = AttackedPoints.one_per_image(self.rob_attacked_BK, self.labels_B)
        return first if self.points is None else first.joined(self.points)


def normed_logits(
    name: str, logits_BK: Tensor, *, clamp: Clamp, ln_k: int | None, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `logits_BK` in float64 after LayerNorm, and the same with each row in descending order.

    The number of classes must be that of `like`, and the result is on its device.

    Raises:
        InvalidInputError: if the logits are not finite, or not a table of at least 2 classes.
    """
    size_at_turn(clamp)  # rejects an unknown clamp
    require_logits(name, logits_BK)
    if like is not None:
        if logits_BK.shape[1] != like.shape[1]:
            raise InvalidInputError(f"{name} has K={logits_BK.shape[1]} classes, the others have K={like.shape[1]}")
        logits_BK = logits_BK.to(like.device)
    width = resolve_ln_k(ln_k, logits_BK.shape[1])
    logits_BK = logits_BK.detach()
    sortable_BK = logits_BK if logits_BK.dtype == torch.float32 else logits_BK.double()
    descending_BK = sort_rows(sortable_BK).flip(-1).double()
    mean_B1, deviation_B1 = norm_statistics(descending_BK[:, :width])
    return (logits_BK.double() - mean_B1) / deviation_B1, (descending_BK - mean_B1) / deviation_B1
