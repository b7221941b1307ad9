"""The unmodified pyautoattack with our budgets and with its passes counted, for cross-checks.

Shapes: B images of C x H x W.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.tf32 import tf32_allowed
from ..config.threat import ThreatModel
from .budget import STANDARD_ATTACKS, AttackBudget


@dataclass
class Published:
    """The package's own object, and the images that its networks have passed so far."""

    package: Any
    n_forward: int = 0
    n_backward: int = 0


def pyautoattack_images(
    model: nn.Module,
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    batch_size: int,
    **options: Any,
) -> tuple[Tensor, int, int]:
    """Return the package's images and its (forward, backward) passes; the options are those of `published`."""
    with published(model, x_BCHW, **options) as theirs:
        x_adv_BCHW = theirs.package.run_standard_evaluation(x_BCHW, y_B, batch_size=batch_size)[0]
    return x_adv_BCHW.to(x_BCHW.device), theirs.n_forward, theirs.n_backward


@contextmanager
def published(
    model: nn.Module,
    like_BCHW: Tensor,
    *,
    threat: ThreatModel,
    budget: AttackBudget,
    seed: int,
    attacks: Sequence[str] = STANDARD_ATTACKS,
    version: str | None = None,
    strict: bool = True,
) -> Iterator[Published]:
    """The package for a classifier, in full float32; without `strict` in TF32 where torch allows it.

    A `version` has the package's own attacks, restarts, targets and draws; otherwise the `attacks` run with one start.
    Iterations, queries and the largest number of targets are those of `budget`. For a mixed classifier, pass
    `MixedClassifier.as_bypass()`, because the package differentiates the logits. Random numbers depend on the batch.
    """
    from pyautoattack import AutoAttack  # here, because nothing else needs the package

    seeded = [like_BCHW.device] if like_BCHW.is_cuda else []  # and no other GPU of the machine
    with tf32_allowed(False) if strict else nullcontext(), torch.random.fork_rng(devices=seeded):

        class Counted(nn.Module):
            def forward(self, images: Tensor) -> Tensor:
                theirs.n_forward += len(images)
                logits: Tensor = model(images)
                if logits.requires_grad:
                    logits.register_hook(counted)  # type: ignore[no-untyped-call]  # untargeted FAB: several a pass
                return logits

        def counted(grad: Tensor) -> None:
            theirs.n_backward += len(grad)

        package = AutoAttack(
            Counted().eval(), norm=threat.norm, eps=threat.eps, attacks=None if version else list(attacks),
            version=version or "custom", seed=seed, device=like_BCHW.device,
        )  # fmt: skip
        theirs = Published(package)
        with torch.no_grad():
            n_targets = budget.n_targets(model(like_BCHW[:1]).shape[1])
        for each in (package.apgd, package.apgd_targeted):  # the package has derived all of these from 100 iterations
            each.n_iter = each.n_iter_orig = budget.n_iter
            each.n_iter_2, each.n_iter_min = max(int(0.22 * budget.n_iter), 1), max(int(0.06 * budget.n_iter), 1)
            each.size_decr = max(int(0.03 * budget.n_iter), 1)
        for each in (package.apgd_targeted, package.fab):
            each.n_target_classes = min(n_targets, each.n_target_classes) if version else n_targets
        for each in () if version else (package.apgd, package.apgd_targeted, package.fab):
            each.n_restarts = 1
        package.fab.n_iter, package.square.n_queries = budget.n_iter, budget.n_queries
        yield theirs
