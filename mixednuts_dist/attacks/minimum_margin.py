"""MMAA, the minimum-margin AutoAttack (paper, appendix B.1): the smallest margin of APGD-CE and APGD-T.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..acceleration.batch_shape import BatchShape
from ..acceleration.precision import FastCopies, PrecisionChoice
from ..config.threat import ThreatModel
from .adaptive import run_ensemble
from .budget import AttackBudget
from .plans import MMAA, margin_plan
from .result import AttackResult, Progress


def minimum_margin_attack(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    n_iter: int = 100,
    n_target_classes: int = 9,
    seed: int = 0,
    stop_when_broken: bool = True,
    border_restarts: int = 2,
    sample_ids: Sequence[int] | None = None,
    batch_size: int | BatchShape | None = None,
    precision: PrecisionChoice | FastCopies = "auto",
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> AttackResult:
    """Search each image's ball for the smallest signed margin of `model` (definition 2.2).

    The other arguments, errors and warnings are those of `autoattack`.

    Args:
        model: images (B, C, H, W) in [0, 1] to logits (B, K); in the paper, the robust classifier with LayerNorm.
        n_iter: iterations of APGD-CE and of each APGD-T target.
        n_target_classes: targets of APGD-T, capped to K - 1.
        border_restarts: repeats from other random starts on borderline images; 0 gives the paper's budget.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
        >>> x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long)
        >>> found = minimum_margin_attack(model, x, y, threat=ThreatModel("Linf", 0.1), n_iter=5)
        >>> bool(((found.x_adv - x).abs() <= 0.1 + 1e-6).all()), len(found.margin)
        (True, 5)
    """
    return run_ensemble(
        model, x_BCHW, y_B, threat=threat, attacks=MMAA, planner=margin_plan, seed=seed,
        budget=AttackBudget(n_iter, n_target_classes, border_restarts=border_restarts),
        stop_when_broken=stop_when_broken, batch_size=batch_size, precision=precision, progress=progress,
        verbose=verbose, sample_ids=sample_ids,
    )  # fmt: skip
