"""Adaptive AutoAttack (paper, appendix B.2): the attacks in order, each on the images that are not broken yet.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..acceleration.arithmetic import Arithmetic, PrecisionChoice
from ..acceleration.batch_shape import BatchShape
from ..config.register import ATTACKS
from ..config.threat import ThreatModel, check_norm
from ..config.versions import version_named
from ..mixing.classifier import MixedClassifier
from .apgd import float32_runs
from .ascent import ApgdRun
from .attack import Setting, runs_of
from .budget import AttackBudget, Preset, preset_attacks
from .draws import Draws, fooling_rates
from .entry import checked_labels
from .gradient_model import AttackedModel, AttackMode, GradientModel, shape_of
from .judge import Judge
from .outcome import AttackOutcome
from .progress import Progress, shown_or
from .scheduler import CACHED, CLEAN, Finished, Group, Scheduler
from .stepper import Run

TRANSFER = "transfer"  # the name of the only attack on a classifier without gradients


def adaptive_autoattack(
    mixed: MixedClassifier,
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    attacks: Sequence[str] | None = None,
    version: str | None = None,
    preset: Preset = "standard",
    eot: int | None = None,
    mode: AttackMode = "transfer",
    seed: int = 0,
    cached_BCHW: Tensor | None = None,
    stop_when_broken: bool = True,
    sample_ids: Sequence[int] | None = None,
    budget: AttackBudget | None = None,
    batch_size: int | BatchShape | None = None,
    precision: PrecisionChoice = "auto",
    arithmetic: Arithmetic | None = None,
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> AttackOutcome:
    """AutoAttack on the mixed classifier with the gradient of its surrogate f_aux (equation 7).

    "apgd-t" ends with the joint attack (`AttackBudget.joint_starts`; 0 leaves it out), unless "joint" is named among
    the attacks. Valid names are those of the register `ATTACKS`. A keyboard interrupt returns what is verified by then.

    Args:
        mixed: the classifier that decides what counts as broken.
        x_BCHW: clean images, (B, C, H, W) floats in [0, 1]; they are not changed.
        y_B: one class an image, (B,) integers in 0 .. K - 1.
        threat: the balls around the images, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        attacks: names of the register `ATTACKS`, in this order; by default those of `preset`.
        version: in place of `attacks`, those of AutoAttack's version by name: standard (the default), plus or rand.
        preset: "standard" is AutoAttack; "fast" a tenth of its passes, without FAB and Square (docs/attacks.md).
        eot: for a random classifier: gradients are averaged over so many draws, in full passes, and `fooled` says how
            often each final point fools (`draws.py`); images that fool half of the time are neither robust nor broken.
        mode: "transfer" (gradient and loss of f_aux) or "bypass" (loss of f_mix, gradient of f_aux).
        cached_BCHW: attacked images of an earlier stage within the same balls, tried first as the attack "cached".
        seed: with `sample_ids` it fixes the random starts.
        stop_when_broken: end with an image once it is misclassified; otherwise minimise its margin to the end.
        sample_ids: B ids that key the noise; 0 .. B-1 by default.
        budget: iterations, targets and queries an image, in place of those of `preset`.
        batch_size, precision, arithmetic, progress, verbose: as in `minimum_margin_attack`.

    Raises:
        InvalidInputError: for an unknown attack, version or mode, for attacks and a version together, and as in
            `minimum_margin_attack`.

    Example:
        >>> from mixednuts_dist import LogitTransform
        >>> std, rob = (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)) for _ in range(2))
        >>> mixed = MixedClassifier(std, rob, LogitTransform(1.0, 1.0, 0.0), alpha=0.6)
        >>> x, y, threat = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long), ThreatModel("Linf", 0.1)
        >>> found = adaptive_autoattack(mixed, x, y, threat=threat, attacks=["apgd-ce"], budget=AttackBudget(n_iter=5))
        >>> found.robust.shape, list(found.survived)
        (torch.Size([5]), ['apgd-ce'])
    """
    attacks, budget = preset_attacks(preset, version, attacks, budget)
    eot = draws_in(version, eot)
    y_B, x_BCHW = checked_labels(mixed, x_BCHW, y_B, threat, attacks, eot), x_BCHW.detach()
    budget = budget.in_version(version, threat.norm)
    engine = ensemble_engine(
        mixed, x_BCHW, threat=threat, attacks=attacks, mode=mode, seed=seed, budget=budget, eot=eot,
        shape=shape_of(batch_size, mixed, x_BCHW), arithmetic=arithmetic or Arithmetic(precision),
        stop_when_broken=stop_when_broken, progress=shown_or(progress, verbose),
    )  # fmt: skip
    return _one(engine, attacks, x_BCHW, y_B, sample_ids, cached_BCHW)


def autoattack(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    attacks: Sequence[str] | None = None,
    version: str | None = None,
    preset: Preset = "standard",
    eot: int | None = None,
    seed: int = 0,
    sample_ids: Sequence[int] | None = None,
    budget: AttackBudget | None = None,
    batch_size: int | BatchShape | None = None,
    precision: PrecisionChoice = "auto",
    arithmetic: Arithmetic | None = None,
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> AttackOutcome:
    """AutoAttack (Croce & Hein 2020) on one differentiable classifier, each attack on what still stands.

    A keyboard interrupt returns what is verified by then.

    Args:
        model: images (B, C, H, W) in [0, 1] -> logits (B, K), K >= 2, in evaluation mode; normalisation inside.
        x_BCHW: clean images, (B, C, H, W) floats in [0, 1]; they are not changed.
        y_B: one class an image, (B,) integers in 0 .. K - 1.
        threat: the balls around the images, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        attacks: names of the register `ATTACKS`, in this order; by default those of `preset`.
        version: in place of `attacks`, those of AutoAttack's version by name: standard (the default), plus or rand.
        preset: "standard" is AutoAttack; "fast" a tenth of its passes, without FAB and Square (docs/attacks.md).
        eot: for a random classifier: gradients are averaged over so many draws, in full passes, and `fooled` says how
            often each final point fools (`draws.py`); images that fool half of the time are neither robust nor broken.
        seed: with `sample_ids` it fixes the random starts.
        sample_ids: B ids that key the noise; 0 .. B-1 by default.
        budget: iterations, targets and queries an image, in place of those of `preset`.
        batch_size: rows of every pass; 64 by default, more for small networks on a CPU.
        precision: of the gradients, "fp32", "tf32", "bf16" or "auto"; verdicts are float32 in any case.
        arithmetic: in place of `precision`, copies of the networks that were made before.
        progress: called with a `Progress` now and then.
        verbose: show the progress on stderr.

    Raises:
        InvalidInputError: for an unknown attack or version, for two of attacks, version and the preset fast, and as in
            `minimum_margin_attack`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> x, y, threat = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long), ThreatModel("Linf", 0.1)
        >>> found = autoattack(model, x, y, threat=threat, attacks=["apgd-ce"], budget=AttackBudget(n_iter=5))
        >>> bool((found.robust == (model(found.x_adv).argmax(1) == y)).all())
        True
    """
    attacks, budget = preset_attacks(preset, version, attacks, budget)
    eot = draws_in(version, eot)
    y_B, x_BCHW = checked_labels(model, x_BCHW, y_B, threat, attacks, eot), x_BCHW.detach()
    budget = budget.in_version(version, threat.norm)
    engine = ensemble_engine(
        model, x_BCHW, threat=threat, attacks=attacks, seed=seed, budget=budget, eot=eot,
        shape=shape_of(batch_size, model, x_BCHW), arithmetic=arithmetic or Arithmetic(precision),
        progress=shown_or(progress, verbose),
    )  # fmt: skip
    return _one(engine, attacks, x_BCHW, y_B, sample_ids, None)


def draws_in(version: str | None, eot: int | None) -> int | None:
    """The draws that were asked for, or those of AutoAttack's version."""
    return version_named(version).eot if eot is None and version is not None else eot


def ensemble_engine(
    model: Callable[[Tensor], Tensor],
    like_BCHW: Tensor,
    *,
    threat: ThreatModel,
    attacks: Sequence[str],
    budget: AttackBudget,
    shape: BatchShape,
    seed: int = 0,
    mode: AttackMode = "transfer",
    arithmetic: Arithmetic | None = None,
    stop_when_broken: bool = True,
    progress: Callable[[Progress], None] | None = None,
    eot: int | None = None,
) -> Scheduler:
    """An engine with the phases of `attacks`; the gradients of a `MixedClassifier` are its surrogate's.

    With `eot` a pass has so many rows of each point, and everything computes in float32.
    """
    for attack in attacks:
        ATTACKS.check(attack)
    check_norm(attacks, threat.norm)
    if eot is None:
        attacked = AttackedModel.of(model, arithmetic=arithmetic, like_BCHW=like_BCHW, rows=shape.rows, mode=mode)
    else:
        draws = Draws(model, eot, seed, mode)
        attacked = AttackedModel(draws, GradientModel(draws.climb), subject=model)
        shape = BatchShape(max(1, shape.rows // eot), fixed=True)
    return Scheduler(
        attacked, lambda setting: ensemble_plan(setting, attacks), threat, budget, seed, shape, stop_when_broken,
        progress,
    )  # fmt: skip


def ensemble_plan(setting: Setting, attacks: Sequence[str]) -> list[Run]:
    """Return all runs of the attacks, in order.

    With low-precision gradients (bfloat16) the float32 runs follow the last attack with `climbs_to_the_end`.
    """
    plan: list[Run] = []
    kinds = [ATTACKS.get(name) for name in attacks]
    climbing = [position for position, kind in enumerate(kinds) if kind.climbs_to_the_end]
    for position, (name, kind) in enumerate(zip(attacks, kinds, strict=True)):
        runs = runs_of(name, setting)
        if position <= min(climbing, default=position) and any(run.float32 for run in runs):
            # Before any attack has climbed there are no margins that select borderline images, so all take these.
            runs = [replace(run, wanted=None) for run in runs if run.float32]
        plan += runs
        if setting.low_precision and position == max(climbing, default=None):
            plan += float32_runs(setting, name, [each for each in plan if isinstance(each, ApgdRun)])
        for follower in kind.followed_by:
            if follower not in attacks:
                plan += [replace(run, attack=name) for run in runs_of(follower, setting)]
    return plan


def ensemble_outcome(engine: Scheduler, attacks: Sequence[str], finished: Finished) -> AttackOutcome:
    """The outcome after one more verdict on the images that are stored: one that is right there counts as robust."""
    group, device = finished.group, finished.group.x.device
    verdicts = engine.judge.verdicts(finished.best, group.y)
    robust = ~verdicts.wrong
    survived, lost_to = {}, {CLEAN}
    for attack in ([CACHED] if group.known is not None else []) + list(attacks):
        lost_to.add(attack)
        fell = torch.tensor([broken_by in lost_to for broken_by in finished.broken_by])
        survived[attack] = (~fell | robust).to(device)
    clean = torch.tensor([broken_by != CLEAN for broken_by in finished.broken_by]).to(device)
    outcome = AttackOutcome(
        clean=clean | robust.to(device),
        robust=robust.to(device),
        survived=survived,
        x_adv=finished.best,
        logits=verdicts.logits.to(device),
        n_forward=finished.n_forward + len(group.y),
        n_backward=finished.n_backward,
        unconfirmed=(finished.broken & robust).to(device),
        decided=finished.decided.to(device),
    )
    draws = engine.attacked.model
    return _with_rates(outcome, draws, group.y, engine.shape.rows) if isinstance(draws, Draws) else outcome


def _with_rates(outcome: AttackOutcome, draws: Draws, y_B: Tensor, rows: int) -> AttackOutcome:
    """The verdicts on a random classifier: those of fresh draws at each image's final point."""
    rates = fooling_rates(draws, outcome.x_adv, y_B, rows=rows)
    broken = rates.broken.to(y_B.device)
    survived = {attack: stood & ~broken for attack, stood in list(outcome.survived.items())[-1:]}
    return replace(
        outcome,
        robust=rates.robust.to(y_B.device),
        survived={**outcome.survived, **survived},
        n_forward=outcome.n_forward * draws.n + int(rates.n_draws.sum()),
        n_backward=outcome.n_backward * draws.n,
        fooled=rates,
    )


def transferred_attack(
    model: nn.Module, x_BCHW: Tensor, y_B: Tensor, x_adv_BCHW: Tensor, *, batch_size: int | BatchShape
) -> AttackOutcome:
    """The outcome of images that were attacked on another classifier: two forward passes of `model` an image.

    The robust share is an upper bound of the model's robustness, since an attack along its own gradient may break more.
    """
    judge = Judge(model, BatchShape.of(batch_size, x_BCHW.device))
    clean_BK, attacked_BK = judge.logits(x_BCHW), judge.logits(x_adv_BCHW)
    right_B = clean_BK.argmax(dim=1) == y_B
    robust_B = right_B & (attacked_BK.argmax(dim=1) == y_B)
    return AttackOutcome(
        clean=right_B,
        robust=robust_B,
        survived={TRANSFER: robust_B},
        x_adv=torch.where(right_B[:, None, None, None], x_adv_BCHW, x_BCHW),
        logits=torch.where(right_B[:, None], attacked_BK, clean_BK),
        n_forward=2 * len(x_BCHW),
        n_backward=0,
        unconfirmed=torch.zeros_like(robust_B),
        decided=torch.ones_like(robust_B),
    )


def _one(
    engine: Scheduler,
    attacks: Sequence[str],
    x: Tensor,
    y: Tensor,
    sample_ids: Sequence[int] | None,
    cached: Tensor | None,
) -> AttackOutcome:
    group = Group(x, y, range(len(x)) if sample_ids is None else sample_ids, cached)
    return ensemble_outcome(engine, attacks, engine.run_one(group))
