"""Plans: the runs of AutoAttack's attacks in order, and the runs of MMAA (paper, appendix B.1)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config.register import ATTACKS
from .apgd import Apgd, float32_runs
from .attack import Setting, runs_of
from .stepper import Run

MMAA = ("apgd-ce", "apgd-t")

Planner = Callable[[Setting, Sequence[str]], Sequence[Run]]  # plans the attacks of these names


def ensemble_plan(setting: Setting, attacks: Sequence[str]) -> list[Run]:
    """Return all runs of the attacks, in order.

    With low-precision gradients (bfloat16) the float32 runs follow the last attack with `climbs_to_the_end`.
    """
    plan: list[Run] = []
    kinds = [ATTACKS.get(name) for name in attacks]
    climbing = [position for position, kind in enumerate(kinds) if kind.climbs_to_the_end]
    for position, (name, kind) in enumerate(zip(attacks, kinds, strict=True)):
        runs = runs_of(name, setting)
        if setting.low_precision and kind.repeats_in_float32:
            if position > min(climbing, default=position):
                runs += [replace(run, float32=True, wanted=setting.is_borderline) for run in runs]
            else:  # no earlier attack shows which images are borderline, so all images take the float32 runs alone
                runs = [replace(run, float32=True) for run in runs]
        plan += runs
        if setting.low_precision and position == max(climbing, default=None):
            plan += float32_runs(setting, name, [each for each in plan if isinstance(each.stepper, Apgd)])
        for follower in kind.followed_by:
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
        plan += [
            replace(run, restart=restart, wanted=setting.is_borderline, block=f"restart {restart}") for run in once
        ]
    return plan + (float32_runs(setting, attacks[-1], plan) if setting.low_precision else [])
