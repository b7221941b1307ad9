"""The joint attack on the mixed classifier, for images that the surrogate's gradients leave standing by a hair.

With a one-hot std (T = 0) class k beats y where std votes for k and rob's gap is small, alpha (p_y - p_k) < 1 - alpha.
Both must hold at one point. A surrogate weighs them against each other; this loss asks for both.

Shapes: B images of C x H x W, K classes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..mixing.classifier import MixedClassifier
from ..threat import ThreatModel
from .apgd import ApgdSchedule, ApgdState, absorb, propose

ROB_WEIGHTS = (16.0, 64.0, 256.0)  # one a random start: std mostly follows by itself, how far differs between images
CLOSING_WEIGHTS = (1024.0, 4096.0)  # from the best point so far, where std has nearly followed


def joint_loss(
    std_logits_BK: Tensor, mapped_logits_BK: Tensor, labels_B: Tensor, targets_B: Tensor, *, rob_weight: float
) -> Tensor:
    """`rob_weight log(1 - (p_y - p_k))` of rob behind its map, plus std's gap to k while it is negative; shape (B,).

    To be maximised. 1 - (p_y - p_k) is a sum of positive terms, 2 p_k and the others but y, so it never saturates.
    """
    log_probs_BK = mapped_logits_BK.log_softmax(dim=1)
    weights_BK = torch.zeros_like(log_probs_BK).scatter(1, targets_B[:, None], math.log(2))
    weights_BK = weights_BK.scatter(1, labels_B[:, None], -torch.inf)
    rob_B = (log_probs_BK + weights_BK).logsumexp(dim=1)
    best_other_B = std_logits_BK.scatter(1, targets_B[:, None], -torch.inf).amax(dim=1)
    std_gap_B = std_logits_BK.gather(1, targets_B[:, None]).squeeze(1) - best_other_B
    return rob_weight * rob_B + std_gap_B.clamp(max=0)


def joint_attack(
    mixed: MixedClassifier,
    x_BCHW: Tensor,
    y_B: Tensor,
    targets_B: Tensor,
    x_start_BCHW: Tensor,
    threat: ThreatModel,
    *,
    n_iter: int,
    rob_weight: float,
    first_step: float,
    watch: Callable[[Tensor, Tensor], None],
) -> None:
    """APGD on `joint_loss`, each image against its target; `watch(x_adv, mixed_logits)` sees every iterate.

    It begins at `x_start_BCHW`, inside the balls around `x_BCHW`, with a step of `first_step` radii.
    """
    schedule = ApgdSchedule(n_iter)
    state = ApgdState.start(x_BCHW, x_start_BCHW, threat, schedule, first_step)
    for _ in range(n_iter + 1):
        x_new = propose(state, threat).requires_grad_()
        with torch.enable_grad():
            std_BK, rob_BK = mixed.std(x_new), mixed.rob(x_new)
            loss = joint_loss(std_BK.double(), mixed.transform(rob_BK.double()), y_B, targets_B, rob_weight=rob_weight)
            (grad,) = torch.autograd.grad(loss.sum(), x_new)
        x_new = x_new.detach()
        absorb(state, x_new, loss.detach().to(x_new), grad, schedule)
        with torch.no_grad():
            watch(x_new, mixed.mix_logits(std_BK, rob_BK))
