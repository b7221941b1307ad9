"""MMAA, the minimum-margin AutoAttack (paper, appendix B.1): the smallest margin of APGD-CE and APGD-T.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ..acceleration.batch_shape import BatchShape
from ..acceleration.precision import FastCopies, PrecisionChoice
from ..config.threat import ThreatModel
from .adaptive import ensemble_engine
from .apgd import float32_runs
from .attack import Setting, borderline, runs_of
from .budget import AttackBudget
from .entry import checked_labels
from .gradient_model import shape_of
from .progress import Progress, shown_or
from .result import AttackResult
from .scheduler import Group
from .stepper import ImageSummary, Run

MMAA = ("apgd-ce", "apgd-t")


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
    precision: PrecisionChoice = "auto",
    copies: FastCopies | None = None,
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> AttackResult:
    """Search each image's ball for the smallest signed margin of `model` (definition 2.2).

    Args:
        model: images (B, C, H, W) in [0, 1] to logits (B, K); in the paper, the robust classifier with LayerNorm.
        x_BCHW: clean images, (B, C, H, W) floats in [0, 1]; they do not change.
        y_B: one class per image, (B,) integers in 0 .. K - 1.
        threat: the ball around each image, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        n_iter: iterations of APGD-CE and of each APGD-T target.
        n_target_classes: targets of APGD-T, capped to K - 1.
        seed: with `sample_ids` it fixes the random starts.
        stop_when_broken: end with an image once it is misclassified; otherwise minimize its margin to the end.
        border_restarts: repeats from other random starts on borderline images; 0 gives the paper's budget.
        sample_ids: the B images' ids in their split; 0 .. B-1 by default.
        batch_size: rows of every pass; 64 by default, more for small networks on a CPU. It is halved if memory runs
            out. Another batch size changes an image's result by rounding.
        precision: the gradients' precision, "fp32", "tf32", "bf16" or "auto"; float32 decides in any case.
        copies: existing copies of the networks, instead of `precision`.
        progress: called with a `Progress` from time to time.
        verbose: show the progress on stderr.

    Raises:
        InvalidInputError: if images and labels do not fit each other or the model, the images leave [0, 1], or the
            model is in training mode, fails, is random or changes its input.

    Warns:
        UserWarning: if the model has no gradient.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
        >>> x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long)
        >>> found = minimum_margin_attack(model, x, y, threat=ThreatModel("Linf", 0.1), n_iter=5)
        >>> bool(((found.x_adv - x).abs() <= 0.1 + 1e-6).all()), len(found.margin)
        (True, 5)
    """
    y_B, x_BCHW = checked_labels(model, x_BCHW, y_B, threat), x_BCHW.detach()
    budget = AttackBudget(n_iter, n_target_classes, border_restarts=border_restarts)
    group = Group(x_BCHW, y_B, range(len(x_BCHW)) if sample_ids is None else sample_ids)
    engine = ensemble_engine(
        model, x_BCHW, threat=threat, attacks=MMAA, planner=margin_plan, budget=budget, seed=seed,
        stop_when_broken=stop_when_broken, shape=shape_of(batch_size, model, x_BCHW),
        copies=copies or FastCopies(precision), progress=shown_or(progress, verbose),
    )  # fmt: skip
    return engine.run_one(group)


def margin_plan(setting: Setting, attacks: Sequence[str] = MMAA) -> list[Run]:
    """Return the runs of the attacks, and the same from other starts for borderline images.

    Float32 runs come once, at the end: after each start their passes would hold few images.
    """

    def near(image: ImageSummary) -> bool:
        return borderline(image.margin, image.clean_margin, setting)

    once = [run for name in attacks for run in runs_of(name, setting)]
    plan = list(once)
    for restart in range(1, setting.budget.border_restarts + 1):
        plan += [replace(run, restart=restart, wanted=near, group=f"restart {restart}") for run in once]
    return plan + (float32_runs(setting, attacks[-1], plan) if setting.low_precision else [])
