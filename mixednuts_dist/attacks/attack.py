"""Attacks: a registered function plans the runs, and a `Stepper` takes their steps for many images at a time.

To add an attack, register a function `Setting -> runs` in its own file, in this folder or anywhere else (then name the
file in the configuration: `extensions: [my_attack.py]`). `examples/pgd.py` is a complete one.

`options` lists the keys of the budget that the attack uses. The decorator also takes `norms` (by default, the attack
supports all of them), `gradients=False` (the attack may run on black boxes; then set `Stepper.gradient_every = 0`),
`mixtures_only`, and `then_on_mixtures`: attacks that follow on mixed classifiers and are reported under this name.
If a stepper has settings, declare them as fields of a frozen dataclass: the runs of equal steppers share a batch.

The scheduler does the rest (`scheduler.py`). It keeps each run's point with the smallest margin and verifies it. An
image takes the runs of a plan one after another. Only consecutive runs with the same `Run.block` and the same stepper
may run on an image at the same time, because none of them needs the result of another one. If several of them break
the image, the first one in the plan counts.
"""

from dataclasses import dataclass
from typing import Any

from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from .budget import AttackBudget
from .stepper import ImageSummary

BORDERLINE = 0.05  # an image is borderline if its margin is below this share of its clean margin
_LEAST_REFERENCE = 0.1  # a smaller clean margin counts as this


@dataclass(frozen=True)
class Setting:
    """The threat model, the budget and the classifier that an attack plans its runs for."""

    threat: ThreatModel
    budget: AttackBudget
    n_classes: int
    model: Any = None  # the attacked classifier; the joint attack reads the weights of a `MixedClassifier`
    low_precision: bool = False  # passes compute in bfloat16, except for runs with `float32`
    tf32: bool = False  # runs with `float32` compute in TF32, which takes little longer than bfloat16

    @property
    def targets(self) -> range:
        """The values of `Run.target`, one per target."""
        return range(1, self.budget.n_targets(self.n_classes) + 1)

    def is_borderline(self, image: ImageSummary, *, slack: float = 0.0) -> bool:
        """Return whether rounding or the random start may decide if an image remains robust: its margin is close to 0.

        The margin minus `slack` has to be below `BORDERLINE` times the clean margin, which counts as at least 0.1. If
        T = 0 and the standard classifier of a mixed classifier votes against the label, the margin is at most
        2 alpha - 1, so the limit is at most half of that.
        """
        limit, mixed = BORDERLINE * max(image.clean_margin, _LEAST_REFERENCE), self.model
        if isinstance(mixed, MixedClassifier) and mixed.mixture.temperature == 0:
            limit = min(limit, (mixed.alpha - mixed.mixture.one_minus_alpha) / 2)
        return image.margin >= 0 and image.margin - slack < limit
