"""Signs that an evaluation claims more than it has shown: one boolean an image and flag, stored with the stage's rows.

Croce & Hein's AutoAttack warns of some of these in its log; here they are counted over the whole run and reported.
Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .losses import ce_loss
from .victim import Victim, judged_logits

NO_GRADIENT, NO_CLIMB = "no_gradient", "no_climb"
UNREPEATABLE, UNCONFIRMED = "unrepeatable", "unconfirmed"
FLAGS = (NO_GRADIENT, NO_CLIMB, UNREPEATABLE, UNCONFIRMED)

_TOLERANCE = 1e-3  # between the logits of two passes


def raised_flags(
    victim: Victim, x_BCHW: Tensor, y_B: Tensor, unconfirmed_B: Tensor, *, batch_size: int
) -> dict[str, Tensor]:
    """Flag -> (B,) bool, in the order of `FLAGS`.

    Args:
        victim: what was attacked; its judge is tried for gradients too, though no attack asks it for any.
        unconfirmed_B: what an attack called broken and a second look did not, as `AttackOutcome.unconfirmed`.
    """
    first_BK, again_BK = (judged_logits(victim, x_BCHW, batch_size) for _ in range(2))
    return {
        NO_GRADIENT: _without_gradient(victim.judge, x_BCHW, y_B, batch_size),
        NO_CLIMB: _without_gradient(lambda x: victim.climb_and_judge(x)[0], x_BCHW, y_B, batch_size),
        UNREPEATABLE: ~torch.isclose(first_BK, again_BK, rtol=_TOLERANCE, atol=_TOLERANCE).all(dim=1),
        UNCONFIRMED: unconfirmed_B,
    }


def has_gradient(model: Callable[[Tensor], Tensor], x_BCHW: Tensor) -> bool:
    """Whether the logits depend on the images in a way that autograd can follow, on at least one of them."""
    labels_B = torch.zeros(len(x_BCHW), dtype=torch.long, device=x_BCHW.device)
    return bool(_gradient(model, x_BCHW, labels_B).any())


def _without_gradient(logits_of: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, batch_size: int) -> Tensor:
    """Where the input gradient of the cross-entropy is zero in every pixel, or does not exist."""
    parts = zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
    return torch.cat([~_gradient(logits_of, *part).flatten(1).any(dim=1) for part in parts])


def _gradient(logits_of: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = ce_loss(logits_of(x), y).sum()
    if not loss.requires_grad:
        return torch.zeros_like(x)
    (grad,) = torch.autograd.grad(loss, x, allow_unused=True)
    return torch.zeros_like(x) if grad is None else grad


def findings(flags: Mapping[str, Tensor], n_classes: int, subject: str) -> list[str]:
    """Plain sentences with the numbers, none where nothing was found; `flags` are a run's, (N,) each."""
    found = []
    counts = {flag: int(raised.sum()) for flag, raised in flags.items()}
    total = {flag: raised.numel() for flag, raised in flags.items()}
    for flag, sentence in _SENTENCES.items():
        if counts.get(flag):
            found.append(f"On {counts[flag]} of {total[flag]} images {sentence.format(subject=subject)}")
    if n_classes < 4:
        targets = n_classes - 1
        found.append(
            f"There are {n_classes} classes: APGD-T and FAB-T have {targets} target{'s' * (targets > 1)} an image, and "
            "the targeted DLR loss, which is defined from 4 classes on, uses the logits that there are."
        )
    return found


_SENTENCES = {
    NO_GRADIENT: "the gradient of {subject}'s own cross-entropy is exactly zero: an attack that follows it is blind "
    "there.",
    NO_CLIMB: "the gradient that the white-box attacks climb is exactly zero: only Square's verdict counts there.",
    UNREPEATABLE: "two passes of {subject} over the same image gave different logits: it is random, and its robust "
    "accuracy is not to be trusted.",
    UNCONFIRMED: "{subject} was fooled by an image and right when it saw the same image again; they count as robust.",
}
