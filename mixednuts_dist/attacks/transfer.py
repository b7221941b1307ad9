"""What is left of a classifier without gradients: its verdicts on images that were attacked on another one.

Shapes: B images of C x H x W.
"""

import torch
from torch import Tensor, nn

from ..acceleration.batch_shape import BatchShape
from .adaptive import AttackOutcome
from .judge import Judge

TRANSFER = "transfer"


def transferred_attack(
    model: nn.Module, x_BCHW: Tensor, y_B: Tensor, x_adv_BCHW: Tensor, *, batch_size: int | BatchShape
) -> AttackOutcome:
    """The outcome of trying `x_adv_BCHW`, made against another classifier, on `model`: two forwards an image.

    An upper bound of the model's robustness: an attack on its own gradients would find more.
    """
    judge = Judge(model, BatchShape.of(batch_size))
    clean_BK, attacked_BK = judge.logits(x_BCHW), judge.logits(x_adv_BCHW)
    right_B = clean_BK.argmax(dim=1) == y_B
    robust_B = right_B & (attacked_BK.argmax(dim=1) == y_B)
    return AttackOutcome(
        robust=robust_B,
        survived={TRANSFER: robust_B},
        x_adv=torch.where(right_B[:, None, None, None], x_adv_BCHW, x_BCHW),
        logits=torch.where(right_B[:, None], attacked_BK, clean_BK),
        n_forward=2 * len(x_BCHW),
        n_backward=0,
        unconfirmed=torch.zeros_like(robust_B),
        decided=torch.ones_like(robust_B),
    )
