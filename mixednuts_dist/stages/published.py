"""The unmodified pyautoattack with our budgets and with its passes counted, for cross-checks."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..acceleration.tf32 import tf32_allowed
from ..attacks.budget import STANDARD_ATTACKS, AttackBudget
from ..config.threat import ThreatModel


def pyautoattack_images(
    model: nn.Module,
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    budget: AttackBudget,
    seed: int,
    batch_size: int,
    attacks: Sequence[str] | None = None,
    version: str | None = None,
    strict: bool = True,
) -> tuple[Tensor, int, int]:
    """Return the package's images, (B, C, H, W), and its (forward, backward) passes.

    With `version`, the package chooses attacks, restarts, targets and draws. Otherwise, it runs `attacks`, by default
    the standard ones, with one start. For a mixed classifier, pass `MixedClassifier.as_bypass()`, because the package
    differentiates the logits. Without `strict`, passes use TF32 if torch's settings allow it.
    """
    from pyautoattack import AutoAttack  # imported here, because only this function needs the package

    n_forward = n_backward = 0

    class Counted(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            nonlocal n_forward
            n_forward += len(images)
            logits: Tensor = model(images)
            if logits.requires_grad:
                logits.register_hook(counted)  # type: ignore[no-untyped-call]  # untargeted FAB: several a pass
            return logits

    def counted(grad: Tensor) -> None:
        nonlocal n_backward
        n_backward += len(grad)

    seeded = [x_BCHW.device] if x_BCHW.is_cuda else []  # leaves the generators of other GPUs alone
    with tf32_allowed(False) if strict else nullcontext(), torch.random.fork_rng(devices=seeded):
        package = AutoAttack(
            Counted().eval(), norm=threat.norm, eps=threat.eps, attacks=None if version else list(STANDARD_ATTACKS),
            version=version or "custom", seed=seed, device=x_BCHW.device,
        )  # fmt: skip
        if attacks is not None:
            package.attacks_to_run = list(attacks)
        with torch.no_grad():
            n_targets = budget.n_targets(model(x_BCHW[:1]).shape[1])
        for each in (package.apgd, package.apgd_targeted):  # the package derived them from 100 iterations
            each.n_iter = each.n_iter_orig = budget.n_iter
            each.n_iter_2, each.n_iter_min = max(int(0.22 * budget.n_iter), 1), max(int(0.06 * budget.n_iter), 1)
            each.size_decr = max(int(0.03 * budget.n_iter), 1)
        for each in (package.apgd_targeted, package.fab):
            each.n_target_classes = min(n_targets, each.n_target_classes) if version else n_targets
        for each in () if version else (package.apgd, package.apgd_targeted, package.fab):
            each.n_restarts = 1
        package.fab.n_iter, package.square.n_queries = budget.n_iter, budget.n_queries
        x_adv_BCHW = package.run_standard_evaluation(x_BCHW, y_B, batch_size=batch_size)[0]
    return x_adv_BCHW.to(x_BCHW.device), n_forward, n_backward
