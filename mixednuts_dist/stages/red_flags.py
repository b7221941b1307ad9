"""Signs that attacks overestimate robustness: one boolean for each image and flag, stored with the stage's rows.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..acceleration.batch_shape import BatchShape, PassSizes, in_one_shape
from ..attacks.entry import LOGITS_TOLERANCE, cross_entropy_gradient
from ..attacks.gradient_model import AttackedModel
from ..attacks.verification import Verifier

# The values are names of stored columns, so they stay as earlier releases wrote them.
NO_GRADIENT, NO_SURROGATE_GRADIENT = "no_gradient", "no_climb"
UNREPEATABLE, UNCONFIRMED = "unrepeatable", "unconfirmed"
FLAGS = (NO_GRADIENT, NO_SURROGATE_GRADIENT, UNREPEATABLE, UNCONFIRMED)


def raised_flags(
    attacked: AttackedModel, x_BCHW: Tensor, y_B: Tensor, unconfirmed_B: Tensor, *, batch_size: int | BatchShape
) -> dict[str, Tensor]:
    """Return flag -> (B,) bool, in the order of `FLAGS`; `unconfirmed_B` is `AttackResult.unconfirmed`."""
    shape = BatchShape.of(batch_size, x_BCHW.device)
    verifier = Verifier(attacked.model, shape)
    first_BK, again_BK = verifier.logits(x_BCHW), verifier.logits(x_BCHW)
    return {
        NO_GRADIENT: _without_gradient(attacked.model, x_BCHW, y_B, shape.float32),
        NO_SURROGATE_GRADIENT: _without_gradient(lambda x: attacked.fast.run(x).logits, x_BCHW, y_B, shape),
        UNREPEATABLE: ~torch.isclose(first_BK, again_BK, rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE).all(dim=1),
        UNCONFIRMED: unconfirmed_B,
    }


def _without_gradient(logits_of: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, shape: BatchShape) -> Tensor:
    rows = torch.arange(len(x), device=x.device)
    grad_BCHW = in_one_shape(lambda i: cross_entropy_gradient(logits_of, x[i], y[i]), rows, PassSizes(shape, None))
    return ~grad_BCHW.flatten(1).any(dim=1)


def findings(flags: Mapping[str, Tensor], n_classes: int, subject: str) -> list[str]:
    """Return one sentence with a count for each flag that any image has; `flags` of all images of a run, (N,) each."""
    found = [
        f"On {int(raised.sum())} of {raised.numel()} images {_SENTENCES[flag].format(subject=subject)}"
        for flag, raised in flags.items()
        if raised.any()
    ]
    if n_classes < 4:
        targets = n_classes - 1
        found.append(
            f"There are {n_classes} classes: APGD-T and FAB-T have {targets} target{'s' * (targets > 1)} an image, and "
            "the targeted DLR loss, whose definition needs 4 classes, is taken over these."
        )
    return found


_SENTENCES = {
    NO_GRADIENT: "the gradient of {subject}'s own cross-entropy is exactly zero: attacks that follow it are blind.",
    NO_SURROGATE_GRADIENT: "the gradient that the white-box attacks follow is zero: only Square's result counts there.",
    UNREPEATABLE: "two passes of {subject} over the same image gave different logits: it is random, and its robust "
    "accuracy is not to be trusted unless gradients are averaged over draws: evaluate: {{eot: 20}}.",
    UNCONFIRMED: "the last verification did not confirm that {subject} is wrong. Such an image counts as robust.",
}
