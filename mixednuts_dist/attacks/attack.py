"""Attacks: an `Attack` plans runs, and a `Stepper` takes their steps for many images at a time (`stepper.py`).

To add an attack, register a subclass of `Attack` in its own file, in this folder or anywhere else (then name the file
in the configuration: `extensions: [my_attack.py]`)::

    from dataclasses import dataclass

    from mixednuts_dist.attacks.attack import Attack
    from mixednuts_dist.attacks.stepper import Counts, Images, Run, SlotState, Stepper
    from mixednuts_dist.config.register import ATTACKS
    from mixednuts_dist.norms.random import hashed, uniform

    @dataclass
    class NoiseState(SlotState):
        x: Images     # (S, C, H, W): one row per slot
        key: Counts
        n_tried: Counts

    class NoiseSteps(Stepper[NoiseState]):
        gradient_every = 0

        def init(self, like):
            return NoiseState.of(like)

        def start(self, state, slots, batch):
            state.x[slots], state.key[slots], state.n_tried[slots] = batch.x, batch.keys(self.seed), 0

        def ask(self, state):
            keys = hashed(state.key, state.n_tried, 1)[:, 0]
            return self.ball.project(uniform(keys, state.x.shape[1:]), state.x)

        def tell(self, state, x, result):
            state.n_tried += 1
            return state.n_tried >= 10

    @ATTACKS("noise", describes="uniform noise, 10 draws", options=())
    class Noise(Attack):
        name = "noise"
        takes_gradient = False

        @staticmethod
        def passes(budget, n_classes):
            return 10, 0

        def runs(self):
            return [Run(self.name, self.name, NoiseSteps(self.setting.threat, self.setting.seed))]

The scheduler does the rest. It keeps the point with the smallest margin of each run, has it verified in float32 when
the run is over or a point is misclassified, counts passes, continues with fewer slots if memory runs out, and gives
free slots to further runs.

The runs of a plan come one after the other. Consecutive runs of one group do not need one another's results, so several
of them may run on an image at once. If several break the image, the first one in the plan counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..config.register import ATTACKS
from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from .budget import AttackBudget
from .stepper import ImageSummary, Run

BORDERLINE = 0.05  # an image is borderline if its margin is below this share of its reference margin
_LEAST_REFERENCE = 0.1


@dataclass(frozen=True)
class Setting:
    """The threat model, the budget and the classifier that an attack plans its runs for."""

    threat: ThreatModel
    budget: AttackBudget
    n_classes: int
    seed: int = 0
    model: Any = None  # the attacked classifier; the joint attack reads the weights of a `MixedClassifier`
    low_precision: bool = False  # passes compute below float32, except for runs with `float32`

    def is_borderline(self, image: ImageSummary, *, slack: float = 0.0) -> bool:
        """Return whether an image that is not broken has a margin close to 0. This is the one rule for it.

        Borderline images are attacked again: by MMAA from other starts, by the joint attack, and, if passes compute
        below float32, by repeating runs in float32, because rounding may decide whether such an image remains robust.

        The margin, less `slack`, is compared with the clean margin, which counts as a tenth at least. If a mixed
        classifier's standard one is one-hot and votes against the label, the margin is at most 2 alpha - 1, however
        sure the robust one is. Then half of that is the limit, so that not every such image is borderline.
        """
        limit, mixed = BORDERLINE * max(image.clean_margin, _LEAST_REFERENCE), self.model
        if isinstance(mixed, MixedClassifier) and mixed.temperature == 0:
            limit = min(limit, (mixed.alpha - mixed.one_minus_alpha) / 2)
        return image.margin >= 0 and image.margin - slack < limit


class Attack:
    """Base class of all attacks: which runs there are, and what they cost."""

    name: ClassVar[str] = ""  # prefix of the random keys; registering a class under another name changes no number
    # Whether the runs follow a loss to its end, so that small margins show afterwards which images are borderline.
    # With low-precision gradients the last such attack of a plan ends with float32 runs (`apgd.float32_runs`).
    climbs_to_the_end: ClassVar[bool] = False
    # Attacks whose runs follow this one's, under its name, unless the ensemble names them itself.
    followed_by: ClassVar[tuple[str, ...]] = ()
    takes_gradient: ClassVar[bool] = True

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        """Return (forward, backward) passes for an image that remains robust, without verifications."""
        raise NotImplementedError

    def runs(self) -> Sequence[Run]:
        """Return the runs on each image, in order."""
        raise NotImplementedError


def runs_of(name: str, setting: Setting) -> list[Run]:
    """Return the runs of the attack that is registered as `name`, with its own budget."""
    own = replace(setting, budget=setting.budget.of(name))
    return [replace(run, attack=name) for run in ATTACKS.get(name)(own).runs()]


def with_float32_repeats(runs: Sequence[Run], setting: Setting) -> list[Run]:
    """Return the runs and, if passes compute below float32, their repeats in float32 for borderline images.

    For attacks that decide by small differences, between two queries or on which side of the border a point lies.
    """
    return [*runs, *(replace(run, float32=True, wanted=setting.is_borderline) for run in runs if setting.low_precision)]
