"""PGD (Madry et al. 2018) as the field runs it for "PGD-20": 20 steps of eps / 4 on cross-entropy, one random start.

Shapes: B images of C x H x W.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..threat import ThreatModel
from .losses import ce_loss
from .projections import project, random_start, steepest
from .victim import Victim

STEP_SHARE = 1 / 4  # of eps, a step: 2/255 of 8/255


def pgd_attack(
    victim: Victim,
    x_BCHW: Tensor,
    y_B: Tensor,
    threat: ThreatModel,
    *,
    n_iter: int,
    keys: Sequence[tuple[object, ...]],
    watch: Callable[[Tensor, Tensor], None],
) -> None:
    """Climb the victim's cross-entropy from one keyed random start an image; every point goes to `watch`.

    The start is APGD's, a random direction of length eps. `watch(x_adv, judged_logits)` sees the start and all
    iterates, so that the best of them is kept, not the last.
    """
    x_adv = random_start(x_BCHW, keys, threat)
    for step in range(n_iter + 1):
        x_adv = x_adv.detach().requires_grad_()
        with torch.enable_grad():
            climbed, judged = victim.climb_and_judge(x_adv)
            (grad,) = torch.autograd.grad(ce_loss(climbed, y_B).sum(), x_adv)
        watch(x_adv.detach(), judged.detach() if victim.exact else victim.judge(x_adv.detach()))
        if step < n_iter:
            x_adv = project(x_adv.detach() + STEP_SHARE * threat.eps * steepest(grad, threat.norm), x_BCHW, threat)
