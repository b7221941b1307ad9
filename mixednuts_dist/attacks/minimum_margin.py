"""MMAA, the minimum-margin AutoAttack (paper, appendix B.1): APGD-CE then APGD-T, the smallest margin seen is kept.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceleration.arithmetic import Arithmetic
from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .apgd import ApgdSchedule
from .engine import Engine, EngineSettings, apgd_plan, begin
from .slots import Tracks
from .victim import Victim, judged_logits

NEAR_BORDER = 0.05  # of the clean margin: whoever is left with less is attacked again from other starts


@dataclass(frozen=True)
class MinimumMarginResult:
    """The smallest signed margin found for each image, and where; re-evaluated in float32 at the `x_adv` returned."""

    x_adv: Tensor  # (B, C, H, W), in the ball and in [0, 1]
    logits: Tensor  # (B, K) float32 at x_adv
    margin: Tensor  # (B,) float64, p_y - max_{j != y} p_j at x_adv; below 0 where fooled
    log_one_minus_margin: Tensor  # (B,) float64, where `margin` itself would saturate at 1
    broken: Tensor  # (B,) bool, the class at x_adv is not the label
    n_forward: int  # images passed forward, all together
    n_backward: int


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
    batch_size: int = 64,
    arithmetic: Arithmetic | None = None,
) -> MinimumMarginResult:
    """Search each image's ball for the smallest signed margin of `model` (definition 2.2).

    Args:
        model: images (B, C, H, W) in [0, 1] -> logits (B, K); for the paper's use rob behind LayerNorm.
        x_BCHW: clean images, float32 in [0, 1].
        y_B: labels, int64.
        n_iter: iterations of APGD-CE and of each APGD-T target.
        n_target_classes: targets of APGD-T, capped to K - 1.
        seed: with `sample_ids` it fixes the random starts, whatever the batch size and the order.
        stop_when_broken: leave an image as soon as it is fooled; otherwise go on to the smallest margin.
        border_restarts: repeats of the whole plan, from other random starts, for images that survive with less than 5 %
            of their clean margin: which of them break is the luck of one start. 0 gives the paper's budget.
        sample_ids: the images' ids in their split; 0 .. B-1 by default.
        batch_size: images under attack at a time; halved where memory ends.
        arithmetic: how gradients are computed; by default on `model` as it is. Whatever it says, the margins, the
            logits and what counts as broken are those of `model` in float32.

    Raises:
        InvalidInputError: where the images and labels do not fit each other or the images leave [0, 1].
    """
    check_images(x_BCHW, y_B)
    victim = Victim.of(model, arithmetic, x_BCHW)
    tracks, targets_NK = begin(victim, x_BCHW, y_B, batch_size)
    settings = EngineSettings(threat, ApgdSchedule(n_iter), seed, batch_size, stop_when_broken)
    plan = apgd_plan(("apgd-ce", "apgd-t"), n_target_classes, targets_NK.shape[1])
    ids = range(len(x_BCHW)) if sample_ids is None else sample_ids
    engine = Engine(victim, x_BCHW, y_B, ids, plan, settings, targets_NK, tracks)
    clean_margin_B = tracks.margin()
    engine.run(first_round(tracks, stop_when_broken))
    for restart in range(1, border_restarts + 1):
        engine.restart = restart
        near_B = tracks.margin() < NEAR_BORDER * clean_margin_B
        engine.run((near_B & ~tracks.broken).nonzero().squeeze(1))
    return judged_result(victim, tracks, y_B, batch_size)


def first_round(tracks: Tracks, stop_when_broken: bool) -> Tensor:
    """The images to attack: all, or those that stand on their clean image."""
    everyone_B = torch.ones_like(tracks.broken)
    return (~tracks.broken if stop_when_broken else everyone_B).nonzero().squeeze(1)


def judged_result(victim: Victim, tracks: Tracks, y_B: Tensor, batch_size: int) -> MinimumMarginResult:
    """What the tracks hold, evaluated once more in float32; the passes are those of the tracks and this one."""
    logits_BK = judged_logits(victim, tracks.x_adv, batch_size)
    log_gap_B = log_one_minus_signed_margin(logits_BK, y_B)
    return MinimumMarginResult(
        x_adv=tracks.x_adv,
        logits=logits_BK,
        margin=-torch.expm1(log_gap_B),
        log_one_minus_margin=log_gap_B,
        broken=logits_BK.argmax(dim=1) != y_B,
        n_forward=tracks.n_forward + len(y_B),
        n_backward=tracks.n_backward,
    )


def check_images(x_BCHW: Tensor, y_B: Tensor) -> None:
    """Refuse what no attack can work on, with the values."""
    if x_BCHW.dim() != 4 or y_B.shape != x_BCHW.shape[:1]:
        raise InvalidInputError(
            f"images of shape {tuple(x_BCHW.shape)} and labels of shape {tuple(y_B.shape)} do not fit: "
            "give images (B, C, H, W) and labels (B,)"
        )
    if not x_BCHW.is_floating_point():
        raise InvalidInputError(f"images are {x_BCHW.dtype}; give float32 in [0, 1] (divide uint8 by 255)")
    if not len(x_BCHW):
        raise InvalidInputError("there is no image to attack: the batch is empty")
    low, high = float(x_BCHW.min()), float(x_BCHW.max())
    if not (low >= 0 and high <= 1):
        raise InvalidInputError(
            f"images range over [{low:g}, {high:g}]; give them in [0, 1], normalisation inside the model"
        )
