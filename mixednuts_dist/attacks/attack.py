"""Attacks: an `Attack` plans runs, and a `Stepper` takes their steps for many images at a time (`stepper.py`).

To add an attack, register a subclass of `Attack` in its own file, in this folder or anywhere else (then name the file
in the configuration: `extensions: [my_attack.py]`). `examples/pgd.py` is a complete one.

`options` lists the keys of the budget that the attack uses. The decorator also takes `norms` (by default, the attack
supports all of them), `gradients=False` (the attack may run on black boxes; then set `Stepper.gradient_every = 0`) and
`mixtures_only`. If a stepper has settings, declare them as fields of a frozen
dataclass, because the runs of equal steppers share a batch.

The scheduler does the rest (`scheduler.py`). It keeps each run's point with the smallest margin and verifies it.

An image takes the runs of a plan one after another. Only consecutive runs with the same `Run.block` and the same
stepper may run on an image at the same time, because none of them needs the result of another one. If several of them
break the image, the first one in the plan counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from .budget import AttackBudget
from .stepper import ImageSummary, Run

BORDERLINE = 0.05  # an image is borderline if its margin is below this share of its clean margin
_LEAST_REFERENCE = 0.1  # a smaller clean margin counts as this


@dataclass(frozen=True)
class Setting:
    """The threat model, the budget and the classifier that an attack plans its runs for."""

    threat: ThreatModel
    budget: AttackBudget
    n_classes: int
    model: Any = None  # the attacked classifier; the joint attack reads the weights of a `MixedClassifier`
    low_precision: bool = False  # passes compute below float32, except for runs with `float32`

    @property
    def targets(self) -> range:
        """The values of `Run.target`, one per target."""
        return range(1, self.budget.n_targets(self.n_classes) + 1)

    def is_borderline(self, image: ImageSummary, *, slack: float = 0.0) -> bool:
        """Return whether an image is not broken but has a margin close to 0. All attacks use this rule.

        Rounding or the random start may decide whether a borderline image remains robust.

        The margin minus `slack` has to be below `BORDERLINE` times the clean margin, which counts as at least 0.1. If
        T = 0 and the standard classifier of a mixed classifier votes against the label, the margin is at most
        2 alpha - 1, so the limit is at most half of that. Otherwise, every image with such a vote could be borderline.
        """
        limit, mixed = BORDERLINE * max(image.clean_margin, _LEAST_REFERENCE), self.model
        if isinstance(mixed, MixedClassifier) and mixed.mixture.temperature == 0:
            limit = min(limit, (mixed.alpha - mixed.mixture.one_minus_alpha) / 2)
        return image.margin >= 0 and image.margin - slack < limit


class Attack:
    """Base class of all attacks: it plans the runs and states how many passes they take."""

    # Part of the keys of random numbers, so registering the class under another name does not change its results.
    name: ClassVar[str] = ""
    # Whether each run maximizes a loss until its last iteration. The margins after such runs show which images are
    # borderline. With low-precision gradients, float32 runs follow the last such attack of a plan
    # (`plans.float32_runs`).
    climbs_to_the_end: ClassVar[bool] = False
    # Attacks that run after this one and are reported under its name, unless the list of attacks contains them.
    followed_by: ClassVar[tuple[str, ...]] = ()
    # Whether the attack depends on small differences, such as Square's between two losses, or FAB's to the decision
    # boundary. If so, borderline images take its low-precision runs once more in float32.
    repeats_in_float32: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        """Return the most (forward, backward) passes for an image that remains robust, without verifications."""
        raise NotImplementedError

    def runs(self) -> Sequence[Run]:
        """Return the runs on each image, in order."""
        raise NotImplementedError
