"""Checks of models, images and labels before the library's attacks begin."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..acceleration.gradient_copy import input_gradient
from ..acceleration.tf32 import tf32_allowed
from ..config.register import ATTACKS
from ..config.threat import ThreatModel, check_norm, check_threat
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier
from ..norms.ball import ball_of
from .verification import check_images

LOGITS_TOLERANCE = 1e-3  # absolute and relative; two passes over the same images differ by less
_N_TRIED = 2
_DROPS = re.compile("drop|stochastic", re.IGNORECASE)  # timm's DropPath, torchvision's StochasticDepth, a user's own


def checked_labels(
    model: Callable[[Tensor], Tensor], x_BCHW: Tensor, y_B: Tensor, threat: ThreatModel, attacks: Sequence[str],
    eot: int | None = None, cached_BCHW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Check the arguments of `autoattack`, with its errors and warnings, and return the labels as int64."""
    _check_types(model, x_BCHW, y_B, threat, attacks, eot)
    check_images(x_BCHW, y_B)
    if cached_BCHW is not None:
        _check_cached(cached_BCHW, x_BCHW, y_B, threat)
    _check_mode(model, random=eot is not None)
    tried = x_BCHW[:_N_TRIED].detach()
    logits_BK = _tried_logits(model, tried, random=eot is not None)
    low, high, last = int(y_B.min()), int(y_B.max()), logits_BK.shape[1] - 1
    if low < 0 or high > last:
        raise InvalidInputError(f"labels range from {low} to {high}, the model's classes from 0 to {last}")
    if any(ATTACKS.entries()[name].facts.get("gradients", True) for name in attacks):
        _check_gradient(model, tried, logits_BK)
    return y_B.long()


def _check_cached(cached_BCHW: Tensor, x_BCHW: Tensor, y_B: Tensor, threat: ThreatModel) -> None:
    check_images(cached_BCHW, y_B)
    if cached_BCHW.shape != x_BCHW.shape:
        shapes = f"the shape {tuple(cached_BCHW.shape)} and the images {tuple(x_BCHW.shape)}"
        raise InvalidInputError(f"cached_BCHW has {shapes}. Pass one adversarial example per image")
    outside = ~ball_of(threat).contains(cached_BCHW, x_BCHW)
    if bool(outside.any()):
        raise InvalidInputError(
            f"cached_BCHW: {int(outside.sum())} of {len(outside)} adversarial examples are outside {threat}. Pass the "
            "clean image for images without one"
        )


def _check_types(model: Any, x: Any, y: Any, threat: Any, attacks: Any, eot: Any) -> None:
    for what, values in (("images", x), ("labels", y)):
        if not isinstance(values, Tensor):
            raise InvalidInputError(f"the {what} are {type(values).__name__}; give a torch tensor")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidInputError(f"labels are {y.dtype}; give the classes' numbers, int64")
    if eot is not None and (isinstance(eot, bool) or not isinstance(eot, int) or eot < 1):
        raise InvalidInputError(f"eot={eot!r} must be a number of draws, at least 1; AutoAttack's rand takes 20")
    check_threat(threat)
    if isinstance(attacks, str):
        raise InvalidInputError(f"attacks={attacks!r} is one string; give a list of names: [{attacks!r}]")
    for name in attacks:
        ATTACKS.check(name)
        if ATTACKS.entries()[name].facts.get("mixtures_only") and not isinstance(model, MixedClassifier):
            raise InvalidInputError(f"attacks={[*attacks]}: {name!r} attacks only a MixedClassifier. Leave it out")
    check_norm(attacks, threat.norm)


def _check_mode(model: Any, random: bool) -> None:
    """Reject modules in training mode that change the logits, except dropout with draws; warn if all train."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        kind = type(module).__name__
        drops = isinstance(module, _DropoutNd | nn.RReLU) or _DROPS.search(kind)
        if module.training and ((drops and not random) or isinstance(module, _BatchNorm | _InstanceNorm)):
            raise InvalidInputError(
                f"the model is in training mode, where {name or kind!r} ({kind}) makes logits depend on chance or on "
                "the other images; call model.eval() first"
            )
    if isinstance(model, nn.Module) and not random and all(module.training for module in model.modules()):
        warnings.warn("the model is in training mode. Call model.eval() first.", stacklevel=5)


@torch.no_grad()
def _tried_logits(model: Callable[[Tensor], Tensor], x: Tensor, random: bool) -> Tensor:
    """Return the logits of a few images; reject a model whose outputs an attack cannot use."""
    given = x.clone()
    try:
        with tf32_allowed(False):
            logits, again = model(given), model(x.clone())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        shape, kind = tuple(x.shape), type(error).__name__
        raise InvalidInputError(f"the model fails on images of shape {shape}: {kind}: {error}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InvalidInputError(f"the model returns {found} for {len(x)} images; it must be logits (images, classes)")
    if not torch.equal(given, x):
        raise InvalidInputError("the model changes the images that it is given; write x = x - mean, not x -= mean")
    if not bool(torch.isfinite(logits).all()):
        raise InvalidInputError("the model returns NaN or infinity on clean images; it must be finite logits")
    if not random and not torch.allclose(logits, again, rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE):
        raise InvalidInputError(
            f"two passes over the same images differ by {float((logits - again).abs().max()):.3g}: the model is "
            "random, or depends on other images; average over its draws with eot=20, or switch the noise off"
        )
    return logits


def _check_gradient(model: Callable[[Tensor], Tensor], x: Tensor, logits_BK: Tensor) -> None:
    """Reject inference mode; warn of probabilities, and of a model or robust base classifier without a gradient."""
    if torch.is_inference_mode_enabled():
        raise InvalidInputError("torch.inference_mode() takes the attack's gradients away; call it outside of it")
    if are_probabilities(logits_BK):
        warnings.warn(
            "the model's outputs sum to 1 on every image: these are probabilities, whose small gradients overestimate "
            "robustness; return the logits before the softmax",
            stacklevel=5,
        )
    subject, tried = ("the mixture's rob", model.rob) if isinstance(model, MixedClassifier) else ("the model", model)
    if not has_gradient(tried, x):
        warnings.warn(
            f"the gradient of {subject} is zero in every pixel (rounding, detach() or a step function on its way?): "
            "gradient attacks cannot succeed, so surviving them is not evidence of robustness; only Square counts",
            stacklevel=5,
        )


def are_probabilities(outputs_BK: Tensor) -> bool:
    """Return whether the outputs of every image sum to 1, as after a softmax."""
    return bool((outputs_BK >= 0).all()) and bool(((outputs_BK.sum(dim=1) - 1).abs() < 1e-4).all())


def has_gradient(model: Callable[[Tensor], Tensor], x_BCHW: Tensor) -> bool:
    """Return whether the gradient of the cross-entropy is nonzero on at least one of the images."""
    labels_B = torch.zeros(len(x_BCHW), dtype=torch.long, device=x_BCHW.device)
    return bool(cross_entropy_gradient(model, x_BCHW, labels_B).any())


def cross_entropy_gradient(model: Callable[[Tensor], Tensor], x_BCHW: Tensor, y_B: Tensor) -> Tensor:
    """Return the gradient of each image's cross-entropy, (B, C, H, W)."""
    x_BCHW = x_BCHW.detach().clone().requires_grad_()
    with torch.enable_grad():
        return input_gradient(F.cross_entropy(model(x_BCHW), y_B, reduction="none"), x_BCHW)
