"""MMAA, the minimum-margin AutoAttack (paper, appendix B.1): APGD-CE then APGD-T, the smallest margin seen is kept.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..acceleration.arithmetic import Arithmetic, PrecisionChoice
from ..acceleration.batch_shape import ON_CPU, BatchShape
from ..config.threat import ThreatModel, check_norm
from .apgd import float32_runs
from .attack import Setting, borderline, runs_of
from .budget import AttackBudget
from .entry import checked_labels
from .gradient_model import AttackedModel, shape_of
from .judge import check_images
from .outcome import images_text
from .progress import Progress, shown_or
from .scheduler import Finished, Group, Scheduler
from .stepper import ImageSummary, Run


@dataclass(frozen=True)
class MinimumMarginResult:
    """The smallest signed margin found for each image, and where; re-evaluated in float32 at the `x_adv` returned."""

    x_adv: Tensor  # (B, C, H, W), in the ball and in [0, 1]
    logits: Tensor  # (B, K) float32 at x_adv
    margin: Tensor  # (B,) float64, p_y - max_{j != y} p_j at x_adv; below 0 where fooled
    log_one_minus_margin: Tensor  # (B,) float64, where `margin` itself would saturate at 1
    broken: Tensor  # (B,) bool, the class at x_adv is not the label
    n_forward: int  # images passed forward, all together; rows that fill a batch up are not counted
    n_backward: int
    decided: Tensor  # (B,) bool, False for images whose attack a keyboard interrupt has cut short

    def __repr__(self) -> str:
        """In three lines, not pixels."""
        n_stand, margins = int((~self.broken).sum()), self.margin[~self.broken]
        shown = f"{margins.min():.3g} to {margins.max():.3g}" if n_stand else "none"
        return (
            f"robust  {n_stand} of {images_text(len(self.broken))}\n"
            f"margins of these, the smallest found: {shown}\n"
            f"passes  {self.n_forward:,} forward, {self.n_backward:,} backward"
        )


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
    arithmetic: Arithmetic | None = None,
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> MinimumMarginResult:
    """Search each image's ball for the smallest signed margin of `model` (definition 2.2).

    A keyboard interrupt returns what is verified by then; `decided` says whose search was complete.

    Args:
        model: images (B, C, H, W) in [0, 1] -> logits (B, K); for the paper's use rob behind LayerNorm.
        x_BCHW: clean images, (B, C, H, W) floats in [0, 1]; they are not changed.
        y_B: one class an image, (B,) integers in 0 .. K - 1.
        threat: the balls around the images, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        n_iter: iterations of APGD-CE and of each APGD-T target.
        n_target_classes: targets of APGD-T, capped to K - 1.
        seed: with `sample_ids` it fixes the random starts.
        stop_when_broken: leave an image as soon as it is fooled; otherwise go on to the smallest margin.
        border_restarts: repeats of the whole plan, from other random starts, for images that survive with less than 5 %
            of their clean margin; which of them break is the luck of one start. 0 gives the paper's budget.
        sample_ids: the B images' ids in their split; 0 .. B-1 by default.
        batch_size: rows of every pass, or the `BatchShape` of a run; 64 by default, and 128 for more images than that
            of a small network on a CPU. Halved where memory ends. An image's result is the same bits in any order and
            company for one batch size, and the same up to rounding for another.
        precision: of the gradients; "auto" takes the fastest that works for this model here, "fp32" stays in float32.
            Whatever it is, the margins, the logits and what counts as broken are those of `model` in float32.
        arithmetic: in place of `precision`, copies of the networks that were made before.
        progress: called with a `Progress` now and then.
        verbose: show the progress on stderr.

    Raises:
        InvalidInputError: where images and labels do not fit each other or the model, or the images leave [0, 1]; for
            a model that is in training mode, fails, is random, or changes its input.

    Warns:
        UserWarning: where the model has no gradient.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long)
        >>> found = minimum_margin_attack(model, x, y, threat=ThreatModel("Linf", 0.1), n_iter=5)
        >>> bool(((found.x_adv - x).abs() <= 0.1 + 1e-6).all()), len(found.margin)
        (True, 5)
    """
    y_B, x_BCHW = checked_labels(model, x_BCHW, y_B, threat), x_BCHW.detach()
    budget = AttackBudget(n_iter, n_target_classes, border_restarts=border_restarts)
    group = Group(x_BCHW, y_B, range(len(x_BCHW)) if sample_ids is None else sample_ids)
    engine = margin_engine(
        model, x_BCHW, threat=threat, budget=budget, seed=seed, stop_when_broken=stop_when_broken,
        shape=shape_of(batch_size, model, x_BCHW), arithmetic=arithmetic or Arithmetic(precision),
        progress=shown_or(progress, verbose),
    )  # fmt: skip
    return margin_result(engine, engine.run_one(group))


def black_box_margin_attack(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    n_queries: int = 5000,
    seed: int = 0,
    stop_when_broken: bool = True,
    sample_ids: Sequence[int] | None = None,
    batch_size: int | BatchShape = ON_CPU,
    progress: Callable[[Progress], None] | None = None,
) -> MinimumMarginResult:
    """The same through the model's answers alone (paper, appendix D): Square, which keeps what lowers the margin.

    Arguments, result and errors are those of `minimum_margin_attack`; `n_queries` is Square's budget an image.
    """
    check_images(x_BCHW, y_B)
    check_norm(["square-margin"], threat.norm)
    group = Group(x_BCHW, y_B, range(len(x_BCHW)) if sample_ids is None else sample_ids)
    engine = Scheduler(
        AttackedModel.of(model), lambda setting: runs_of("square-margin", setting), threat,
        AttackBudget(n_queries=n_queries), seed, BatchShape.of(batch_size, x_BCHW.device), stop_when_broken, progress,
    )  # fmt: skip
    return margin_result(engine, engine.run_one(group))


def margin_engine(
    model: Callable[[Tensor], Tensor],
    like_BCHW: Tensor,
    *,
    threat: ThreatModel,
    budget: AttackBudget,
    seed: int,
    stop_when_broken: bool,
    shape: BatchShape,
    arithmetic: Arithmetic | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Scheduler:
    """An engine with MMAA's plan; fast copies are tried on images like `like_BCHW`."""
    attacked = AttackedModel.of(model, arithmetic=arithmetic, like_BCHW=like_BCHW, rows=shape.rows)
    return Scheduler(attacked, margin_plan, threat, budget, seed, shape, stop_when_broken, progress)


def margin_plan(setting: Setting) -> list[Run]:
    """Return MMAA's runs, and the same from other starts for borderline images.

    Float32 runs come once, at the end: after each start their passes would hold few images.
    """

    def near(image: ImageSummary) -> bool:
        return borderline(image.margin, image.clean_margin, setting)

    once = [run for name in ("apgd-ce", "apgd-t") for run in runs_of(name, setting)]
    plan = list(once)
    for restart in range(1, setting.budget.border_restarts + 1):
        plan += [replace(run, restart=restart, wanted=near, group=f"restart {restart}") for run in once]
    return plan + (float32_runs(setting, "apgd-t", plan) if setting.low_precision else [])


def margin_result(engine: Scheduler, finished: Finished) -> MinimumMarginResult:
    """What the engine has found, evaluated once more in float32; this pass is counted."""
    group = finished.group
    verdicts = engine.judge.verdicts(finished.best, group.y)
    device = group.x.device
    return MinimumMarginResult(
        x_adv=finished.best,
        logits=verdicts.logits.to(device),
        margin=verdicts.margin.to(device),
        log_one_minus_margin=verdicts.log1m_margin.to(device),
        broken=verdicts.wrong.to(device),
        n_forward=finished.n_forward + len(group.y),
        n_backward=finished.n_backward,
        decided=finished.decided.to(device),
    )
