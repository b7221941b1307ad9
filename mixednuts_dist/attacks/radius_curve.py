"""Robustness at several radii of one norm, each begun from what the others have found.

An image that stands at a radius counts as standing at all smaller ones, and one that falls at a radius falls at all
larger ones, since balls of one centre are nested. So each radius attacks only the images that the others leave open,
the largest radius first, beginning at the nearest larger radius's point, scaled to the radius.

Shapes: B images of C x H x W, R radii.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceleration.arithmetic import Arithmetic
from ..acceleration.batch_shape import BatchShape
from ..config.threat import ThreatModel
from ..norms.ball import ball_of
from .adaptive import ensemble_engine, ensemble_outcome
from .budget import AttackBudget
from .engine import Group
from .gradient_model import AttackMode
from .judge import Judge


@dataclass(frozen=True)
class Reference:
    """What is known at one of the radii before the others are attacked."""

    place: int  # in the ascending radii
    robust: Tensor  # (B,) bool
    x_adv: Tensor  # (B, C, H, W), the attack's points


@dataclass(frozen=True)
class RadiusCurve:
    """Which images stand at each radius."""

    robust: Tensor  # (B, R) bool; along a row no False is followed by True
    n_forward: int
    n_backward: int


def radius_curve(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threats: Sequence[ThreatModel],
    attacks: Sequence[str],
    budget: AttackBudget,
    shape: BatchShape,
    seed: int = 0,
    mode: AttackMode = "transfer",
    arithmetic: Arithmetic | None = None,
    sample_ids: Sequence[int] | None = None,
    reference: Reference | None = None,
) -> RadiusCurve:
    """The ensemble at radii of one norm; the passes of the reference are not counted again.

    Args:
        threats: one norm, ascending radii.
        sample_ids: key the noise; 0 .. B-1 by default.
        reference: what a run has found at one of the radii.
    """
    ids = list(range(len(x_BCHW)) if sample_ids is None else sample_ids)
    right_B = Judge(model, shape).logits(x_BCHW).argmax(dim=1) == y_B
    n_forward, n_backward = len(x_BCHW), 0
    robust = {} if reference is None else {reference.place: reference.robust & right_B}
    points = {} if reference is None else {reference.place: reference.x_adv}
    for place in sorted(set(range(len(threats))) - robust.keys(), reverse=True):
        proven_B = _any(right_B, [stands for other, stands in robust.items() if other > place])
        lost_B = _any(right_B, [~stands for other, stands in robust.items() if other < place])
        near = min((other for other in points if other > place), default=max(points, default=None))
        known = x_BCHW if near is None else _scaled(points[near], x_BCHW, threats[near], threats[place])
        rows = (right_B & ~proven_B & ~lost_B).nonzero().squeeze(1)
        stands_B, found = proven_B & right_B, known.clone()
        if len(rows):
            engine = ensemble_engine(
                model, x_BCHW[rows], threat=threats[place], attacks=attacks, budget=budget, shape=shape, seed=seed,
                mode=mode, arithmetic=arithmetic,
            )  # fmt: skip
            group = Group(x_BCHW[rows], y_B[rows], [ids[row] for row in rows.tolist()], known[rows])
            outcome = ensemble_outcome(engine, attacks, engine.run_one(group))
            stands_B[rows], found[rows] = outcome.robust, outcome.x_adv
            n_forward, n_backward = n_forward + outcome.n_forward, n_backward + outcome.n_backward
        robust[place], points[place] = stands_B, found
    return RadiusCurve(torch.stack([robust[place] for place in range(len(threats))], dim=1), n_forward, n_backward)


def _any(like_B: Tensor, flags: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.zeros_like(like_B), *flags]).any(dim=0)


def _scaled(x_adv: Tensor, x: Tensor, of: ThreatModel, to: ThreatModel) -> Tensor:
    """Points of the ball `of` along their own directions in the ball `to`."""
    return ball_of(to).project(x + (x_adv - x) * (to.eps / of.eps), x)
