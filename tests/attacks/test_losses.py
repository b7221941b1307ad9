"""Losses against the published ones, and where those crash."""

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted

from mixednuts_dist.attacks.gradient_model import Outputs
from mixednuts_dist.config.register import LOSSES
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin


def loss_of(name: str, logits: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = LOSSES.get(name)(Outputs(logits), labels, targets)
    return loss


def logits_and_labels(n_classes: int, n: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_classes)
    logits = 5 * torch.randn(n, n_classes, generator=generator)
    labels = torch.randint(n_classes, (n,), generator=generator)
    targets = (labels + 1 + torch.randint(n_classes - 1, (n,), generator=generator)) % n_classes
    return logits, labels, targets


@pytest.mark.parametrize("n_classes", [4, 10, 100])
def test_dlr_equals_the_published_loss(n_classes: int) -> None:
    logits, labels, targets = logits_and_labels(n_classes)
    published = APGDAttack(None, eps=0.1)
    ours = loss_of("untargeted-dlr", logits, labels, targets)
    assert torch.allclose(ours, published.dlr_loss(logits, labels))
    targeted = APGDAttack_targeted(None, eps=0.1)
    targeted.y_target = targets
    assert torch.allclose(loss_of("dlr", logits, labels, targets), targeted.dlr_loss_targeted(logits, labels))


@pytest.mark.parametrize("n_classes", [2, 3, 4, 10])
def test_losses_are_finite_with_finite_gradients_even_for_ties(n_classes: int) -> None:
    certain = 1e4 * torch.eye(n_classes)[:1].repeat(5, 1)
    for logits in (torch.zeros(5, n_classes), logits_and_labels(n_classes, 5)[0], certain):
        leaf = logits.clone().requires_grad_()
        labels, targets = torch.zeros(5, dtype=torch.long), torch.ones(5, dtype=torch.long)
        names = ("ce", "untargeted-dlr", "dlr", "margin")
        total = torch.stack([loss_of(name, leaf, labels, targets) for name in names]).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        assert bool(torch.isfinite(total))
        assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("n_classes", [2, 3, 4, 10])
def test_a_loss_is_positive_once_the_target_has_won(n_classes: int) -> None:
    logits, labels, targets = logits_and_labels(n_classes)
    won = logits.gather(1, targets[:, None]) > logits.gather(1, labels[:, None])
    assert torch.equal(loss_of("dlr", logits, labels, targets) > 0, won.squeeze(1))
    assert torch.equal(loss_of("untargeted-dlr", logits, labels, targets) > 0, logits.argmax(dim=1) != labels)


@pytest.mark.parametrize("n_classes", [2, 3, 10])
@pytest.mark.parametrize("sharpness", [1.0, 1e-3, 1e4])
def test_the_margin_loss_is_the_margin_and_never_saturates(n_classes: int, sharpness: float) -> None:
    logits, labels, _ = logits_and_labels(n_classes)
    leaf = (sharpness * logits.double()).requires_grad_()
    loss = loss_of("margin", leaf, labels, labels)
    assert torch.allclose(loss, log_one_minus_signed_margin(leaf.detach(), labels), rtol=1e-6, atol=1e-9)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert bool(torch.isfinite(grad).all())
    assert bool((grad.abs().amax(dim=1)[loss < 0] > 0).all())
