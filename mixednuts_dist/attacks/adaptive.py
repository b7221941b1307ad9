"""The library calls: AutoAttack, adaptive for mixed classifiers (paper, appendix B.2), and MMAA (appendix B.1)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..acceleration.batch_shape import BatchShape, shape_of
from ..acceleration.precision import FastCopies, PrecisionChoice
from ..config.threat import ThreatModel, check_threat
from ..config.versions import version_named
from ..errors import InvalidInputError
from .budget import AttackBudget, attacks_in
from .entry import checked_labels
from .gradient_model import AttackMode
from .plans import MMAA, margin_plan
from .result import AttackResult, Progress, show_progress
from .scheduler import Group, Scheduler


def autoattack(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    version: str = "standard",
    attacks: Sequence[str] | None = None,
    mode: AttackMode = "transfer",
    seed: int = 0,
    budget: AttackBudget | None = None,
    batch_size: int | BatchShape | None = None,
    eot: int | None = None,
    cached_BCHW: Tensor | None = None,
    stop_when_broken: bool = True,
    sample_ids: Sequence[int] | None = None,
    precision: PrecisionChoice | FastCopies = "auto",
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> AttackResult:
    """Run AutoAttack (Croce & Hein 2020) on a classifier, each attack on the images that are not broken yet.

    Attacks on a `MixedClassifier` are adaptive: they follow the gradient of its surrogate f_aux (equation 7), and the
    mixed classifier itself decides whether an image is broken. Its "apgd-t" ends with the joint attack unless "joint"
    is among the attacks. A keyboard interrupt returns what is verified by then (`AttackResult.decided`).

    Args:
        model: images (B, C, H, W) in [0, 1] to logits (B, K), K >= 2, in evaluation mode, with its normalization
            inside; or a `MixedClassifier`.
        x_BCHW, y_B: clean images, (B, C, H, W) floats in [0, 1], and their labels, (B,) integers in 0 .. K - 1.
        threat: the ball around each image, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        version: "standard", "plus" or "rand" (for random classifiers): AutoAttack's attacks, restarts, targets, draws.
        attacks: names of the register `ATTACKS`, in this order, instead of those of the standard version; or some of
            those of another version.
        mode: for a mixed classifier, "transfer" (loss and gradient of f_aux) or "bypass" (loss of f_mix, gradient of
            f_aux).
        seed, sample_ids: fix the random numbers; there is one id per image, 0 .. B - 1 by default.
        budget: iterations, targets and queries per image.
        batch_size: rows of every pass; by default up to 64 on a CPU (128 for small networks) and 512 on a GPU, where
            verifications have 32. The call halves the rows if memory runs out. Rounding depends on the batch size.
        eot: draws per image over which gradients of a random classifier are averaged; 20 in version "rand".
        cached_BCHW: known adversarial examples, one per image, tried first as the attack "warm-start".
        stop_when_broken: stop attacking an image once it is broken; otherwise, search for its smallest margin.
        precision: the gradients' precision, "fp32", "tf32", "bf16" or "auto", or existing copies of the networks.
            Verification is always in float32, and so are all passes with `eot`.
        progress: called with a `Progress` from time to time.
        verbose: show the progress on stderr.

    Raises:
        InvalidInputError: for an unknown attack, version or mode, if images, labels and model do not fit each other,
            if the images leave [0, 1], or if the model is in training mode, fails, is random or changes its input.

    Warns:
        UserWarning: if an attack follows a gradient that the model does not have.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
        >>> x, y, threat = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long), ThreatModel("Linf", 0.1)
        >>> found = autoattack(model, x, y, threat=threat, attacks=["apgd-ce"], budget=AttackBudget(n_iter=5))
        >>> bool((found.robust == (model(found.x_adv).argmax(1) == y)).all()), list(found.survived)
        (True, ['apgd-ce'])
    """
    check_threat(threat)
    given: Any = budget
    if not isinstance(given, AttackBudget | None):
        keys = f"**{given}" if isinstance(given, Mapping) else "n_iter=..."
        raise InvalidInputError(f"budget={given!r} is not an AttackBudget. Pass AttackBudget({keys})")
    return _attack_all(
        model, x_BCHW, y_B, threat=threat, attacks=attacks_in(version, attacks), mode=mode, seed=seed,
        eot=version_named(version).eot if eot is None else eot, cached_BCHW=cached_BCHW, sample_ids=sample_ids,
        budget=(budget or AttackBudget()).in_version(version, threat.norm), stop_when_broken=stop_when_broken,
        batch_size=batch_size, precision=precision, progress=progress, verbose=verbose,
    )  # fmt: skip


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
    precision: PrecisionChoice | FastCopies = "auto",
    progress: Callable[[Progress], None] | None = None,
    verbose: bool = False,
) -> AttackResult:
    """Search each image's ball for the smallest signed margin of `model` (definition 2.2).

    The other arguments, errors and warnings are those of `autoattack`.

    Args:
        model: images (B, C, H, W) in [0, 1] to logits (B, K); in the paper, the robust classifier with LayerNorm.
        n_iter: iterations of APGD-CE and of each APGD-T target.
        n_target_classes: targets of APGD-T, capped to K - 1.
        border_restarts: repeats from other random starts on borderline images; 0 gives the paper's budget.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
        >>> x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long)
        >>> found = minimum_margin_attack(model, x, y, threat=ThreatModel("Linf", 0.1), n_iter=5)
        >>> bool(((found.x_adv - x).abs() <= 0.1 + 1e-6).all()), len(found.margin)
        (True, 5)
    """
    return _attack_all(
        model, x_BCHW, y_B, threat=threat, attacks=MMAA, planner=margin_plan, seed=seed,
        budget=AttackBudget(n_iter, n_target_classes, border_restarts=border_restarts),
        stop_when_broken=stop_when_broken, batch_size=batch_size, precision=precision, progress=progress,
        verbose=verbose, sample_ids=sample_ids,
    )  # fmt: skip


def _attack_all(
    model: Callable[[Tensor], Tensor], x_BCHW: Tensor, y_B: Tensor, *, threat: ThreatModel, attacks: Sequence[str],
    batch_size: int | BatchShape | None, precision: PrecisionChoice | FastCopies, verbose: bool,
    progress: Callable[[Progress], None] | None, sample_ids: Sequence[int] | None, cached_BCHW: Tensor | None = None,
    eot: int | None = None, **options: Any,
) -> AttackResult:  # fmt: skip
    """Check the arguments of a library call, and attack all images; `options` are those of `Scheduler`."""
    sample_ids = range(len(x_BCHW)) if sample_ids is None else sample_ids
    if len(sample_ids) != len(x_BCHW):
        raise InvalidInputError(f"there are {len(sample_ids)} sample_ids for {len(x_BCHW)} images. Pass one per image")
    y_B, x_BCHW = checked_labels(model, x_BCHW, y_B, threat, attacks, eot, cached_BCHW), x_BCHW.detach()
    scheduler = Scheduler(
        model, x_BCHW, threat=threat, attacks=attacks, eot=eot, shape=shape_of(batch_size, model, x_BCHW),
        copies=precision if isinstance(precision, FastCopies) else FastCopies(precision),
        progress=progress or (show_progress if verbose else None), **options,
    )  # fmt: skip
    return scheduler.run_one(Group(x_BCHW, y_B, sample_ids, cached_BCHW))
