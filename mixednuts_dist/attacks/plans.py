"""Plans: the runs of AutoAttack's attacks in order, and the runs of MMAA (paper, appendix B.1)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config.register import ATTACKS
from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from .apgd import Apgd, stepper_for
from .attack import ImageSummary, Run, Setting
from .budget import AttackBudget

MMAA = ("apgd-ce", "apgd-t")
# Float32 steps on the margin itself, from the best point that low-precision gradients found.
POLISH_ITERATIONS, POLISH_STEP = 10, 0.5
# They are repeated if the margin fell by more than `POLISH_AGAIN`, for at most `POLISH_ROUNDS` rounds in all.
POLISH_AGAIN, POLISH_ROUNDS = 1e-2, 6

Planner = Callable[[Setting, Sequence[str]], Sequence[Run]]  # plans the attacks of these names


def ensemble_plan(setting: Setting, attacks: Sequence[str]) -> list[Run]:
    """Return all runs of the attacks, in order.

    With low-precision gradients (bfloat16) the float32 runs follow the last APGD attack, whose margins show which
    images are borderline.
    """
    plan: list[Run] = []
    planned = [runs_of(name, setting) for name in attacks]
    apgd = [place for place, runs in enumerate(planned) if any(isinstance(run.stepper, Apgd) for run in runs)]
    for place, (name, runs) in enumerate(zip(attacks, planned, strict=True)):
        repeated = [run for run in runs if setting.low_precision and run.stepper.repeats_in_float32]
        if repeated and (setting.tf32 or place <= min(apgd, default=place)):
            # Without an earlier APGD attack, it is unknown which images are borderline. In TF32, passes of full batches
            # take less time in all than passes in bfloat16 and passes of batches with few borderline images.
            plan += [replace(run, float32=True) for run in runs]
        else:
            plan += [*runs, *(replace(run, float32=True, wanted=setting.is_borderline) for run in repeated)]
        if setting.low_precision and place == max(apgd, default=None):
            plan += float32_runs(setting, name, [each for each in plan if isinstance(each.stepper, Apgd)])
        if isinstance(setting.model, MixedClassifier):
            for follower in ATTACKS.entries()[name].facts.get("then_on_mixtures", ()):
                if follower not in attacks:
                    plan += [replace(run, attack=name) for run in runs_of(follower, setting)]
    return plan


def margin_plan(setting: Setting, attacks: Sequence[str] = MMAA) -> list[Run]:
    """Return the runs of the attacks, and their repeats from other starts for borderline images.

    The float32 runs come once, at the end, so that their passes hold as many images as possible.
    """
    once = [run for name in attacks for run in runs_of(name, setting)]
    plan = list(once)
    for restart in range(1, setting.budget.border_restarts + 1):
        block = f"restart {restart}"
        plan += [replace(run, restart=restart, wanted=setting.is_borderline, block=block) for run in once]
    return plan + (float32_runs(setting, attacks[-1], plan) if setting.low_precision else [])


def runs_of(name: str, setting: Setting) -> list[Run]:
    """Return the runs of the attack that is registered as `name`, planned with the budget of this attack."""
    own = replace(setting, budget=setting.budget.of(name))
    return [replace(run, attack=name) for run in ATTACKS.get(name)(own)]


def passes_of(attack: str, budget: AttackBudget, n_classes: int) -> tuple[int, int]:
    """Return the most (forward, backward) passes of an attack on an image, without verifications."""
    runs = runs_of(attack, Setting(ThreatModel("Linf", 1.0), budget, n_classes))  # the ball does not matter
    each = [(run.stepper, run.stepper.most_passes(n_classes)) for run in runs]
    return sum(n for _, n in each), sum(stepper.n_backward(n) for stepper, n in each)


def float32_runs(setting: Setting, attack: str, low_precision: Sequence[Run]) -> list[Run]:
    """Return the float32 runs that follow runs with low-precision gradients: first a polish, then repeats.

    The polish is a short run on the margin from the best point of each image, which repeats as long as it lowers the
    margin by more than `POLISH_AGAIN`. A borderline image then repeats in float32 the low-precision runs that it did
    not take or whose own smallest margin was borderline, because low-precision gradients are too inexact for the last
    thousandth of the margin.
    """

    def borderline(image: ImageSummary) -> bool:
        return setting.is_borderline(image) and setting.is_borderline(replace(image, margin=image.repeated_margin))

    stepper = stepper_for(setting.threat, POLISH_ITERATIONS, POLISH_STEP)
    polish = Run("polish", stepper, from_best=True, loss="margin", float32=True, attack=attack)
    again = [replace(polish, wanted=lambda image: image.gain > POLISH_AGAIN)] * (POLISH_ROUNDS - 1)
    return [polish, *again, *(replace(run, float32=True, wanted=borderline, block="repeats") for run in low_precision)]
