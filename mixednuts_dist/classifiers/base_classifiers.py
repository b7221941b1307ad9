"""Load, check, hash and measure base classifiers: modules that map images in [0, 1] to logits and normalize inside.

Shapes: B images of C x H x W, K classes.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..attacks.entry import are_probabilities
from ..config.uris import GIVEN, ClassifierSource
from ..errors import BaseClassifierError, MixedNutsError
from .black_box_classifier import BlackBoxClassifier
from .factories import find_function, source_of

# Rounding may change logits by 1e-3 of their size between batch sizes if an accelerator uses TF32. Passes of a random
# classifier, or of one whose logits depend on the other images, differ by far more.
_SAME = 1e-3
_TOLERANCE = 1e-3


class Normalized(nn.Module):
    """Compute `net((images - mean) / std)` of images (B, C, H, W) in [0, 1], with mean and std per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the logits of the network, shape (B, K)."""
        logits_BK: Tensor = self.net((images_BCHW - self.mean) / self.std)
        return logits_BK


def load_classifier(uri: str, role: str = "classifier") -> nn.Module:
    """Build the classifier that `uri` names, in eval mode and without parameters that require gradients.

    Args:
        uri: for instance `timm:resnet18`; `mixednuts schema --names` lists the schemes. A module that a caller passed
            to `run` or `mix` is copied.
        role: the name of the classifier in error messages.

    Raises:
        BaseClassifierError: for an unknown form, missing or unsuitable weights, or a factory that fails.
    """
    source = ClassifierSource.of(uri)
    with torch.random.fork_rng(devices=[]):  # weights that a constructor draws are the same on every machine
        torch.default_generator.manual_seed(int(source.option("seed") or 0) if source.option("weights") else 0)
        model = source.open(role)
    if not isinstance(model, nn.Module):
        raise BaseClassifierError(f"{role}={uri!r} returned {type(model).__name__}, not a torch module")
    model = model if source.given is None else copy.deepcopy(model)
    return model.eval().requires_grad_(False)


def classifier_checksum(model: nn.Module, uri: str = GIVEN) -> str:
    """Return one sha256 of all parameters and buffers, and of a function's source file or a black box's URI."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    source = ClassifierSource.of(uri)
    if source.fact("target") == "factory":
        sha.update(source_of(find_function(source.target)))
    if source.is_black_box:
        sha.update(uri.encode())
    return sha.hexdigest()


@torch.no_grad()
def check_classifier(model: nn.Module, images_BCHW: Tensor, role: str, *, random: bool = False) -> int:
    """Try the classifier on a few images and return its number of classes.

    Args:
        random: whether the classifier may return different logits for the same images.

    Raises:
        BaseClassifierError: if images are normalized twice, or if the output is not (B, K) with K >= 2, is not finite,
            is not repeatable, depends on the other images of the batch, or consists of probabilities (DLR, LayerNorm
            and the mixing need logits).
    """
    half = len(images_BCHW) // 2
    try:
        logits_BK, again_BK = _fresh(model, images_BCHW), _fresh(model, images_BCHW)
        halves = [_fresh(model, part) for part in (images_BCHW[:half], images_BCHW[half:]) if len(part)]
    except MixedNutsError as error:
        raise BaseClassifierError(f"{role}: {error}") from error
    except (Exception, SystemExit) as error:
        what = f"images of shape {tuple(images_BCHW.shape)}: {type(error).__name__}: {error}"
        raise BaseClassifierError(f"{role} fails on {what}") from error
    if random:
        again_BK, halves = logits_BK, [logits_BK]
    problem = _output_problem(logits_BK, again_BK, halves, len(images_BCHW))
    if problem := problem or _normalized_twice(model, images_BCHW[:2]):
        raise BaseClassifierError(f"{role}: {problem}")
    return int(logits_BK.shape[1])


def _fresh(model: nn.Module, images_BCHW: Tensor) -> Any:
    """Remove the stored answers of a black box, and compute one pass."""
    if isinstance(model, BlackBoxClassifier):
        model.kept.clear()
    return model(images_BCHW)


def _output_problem(logits: Any, again: Any, halves: Sequence[Any], n_images: int) -> str | None:
    """Return the problem with the logits of a batch, given those of a second pass and of the two halves, or None."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != n_images or logits.shape[1] < 2:
        return f"the output is {shape} for {n_images} images; it must be logits of shape (images, classes)"
    if not logits.is_floating_point() or not bool(torch.isfinite(logits).all()):
        what = "holds NaN or infinity" if logits.is_floating_point() else f"is {logits.dtype}"
        return f"the output {what}; it must be finite floating-point logits, before any rounding or argmax"
    if are_probabilities(logits):
        return "the output sums to 1 on every image: these are probabilities; return the logits before the softmax"
    if not torch.allclose(logits, again, rtol=_SAME, atol=_SAME):
        worst = float((logits - again).abs().max())
        return (
            f"two passes over the same images differ by {worst:.3g}: the forward is random. Average over its draws "
            "with evaluate.eot=20, or switch the noise off"
        )
    apart = torch.cat(list(halves))
    if apart.shape != logits.shape or not torch.allclose(logits, apart, rtol=_SAME, atol=_SAME):
        worst = float((logits - apart).abs().max()) if apart.shape == logits.shape else float("inf")
        return (
            f"the logits of an image differ by {worst:.3g} between a batch and its halves: they depend on the other "
            "images, so that no attack could be trusted. Call model.eval(), and do not center over the batch"
        )
    return None


def _normalized_twice(model: nn.Module, images_BCHW: Tensor) -> str | None:
    """Return a sentence if a module that subtracts its own mean receives values outside [0, 1], otherwise None.

    The output must change with the mean, because some classes have a mean and never use it.
    """
    for name, module in model.named_modules():
        mean = _own_mean(module, images_BCHW.shape[1])
        if mean is None:
            continue
        received: list[Tensor] = []
        with module.register_forward_pre_hook(
            lambda _, given, seen=received: seen.extend(x for x in given if isinstance(x, Tensor))
        ):
            logits_BK, before = model(images_BCHW), mean.clone()
        low, high = min([0.0, *(float(x.min()) for x in received)]), max([1.0, *(float(x.max()) for x in received)])
        if low >= -_TOLERANCE and high <= 1 + _TOLERANCE:
            continue
        mean.add_(0.25)
        is_used = not torch.equal(model(images_BCHW), logits_BK)
        mean.copy_(before)
        if is_used:
            return (
                f"the images are normalized twice: its part {name!r} ({type(module).__name__}) subtracts its own mean, "
                f"but receives values from {low:.2f} to {high:.2f}; remove one of the two normalizations"
            )
    return None


def _own_mean(module: nn.Module, n_channels: int) -> Tensor | None:
    for names in (("mean", "std"), ("mu", "sigma")):
        mean, std = (getattr(module, name, None) for name in names)
        if isinstance(mean, Tensor) and isinstance(std, Tensor) and mean.numel() == std.numel() == n_channels:
            return mean
    return None


@dataclass(frozen=True)
class ModelSize:
    """Learned parameters, and floating-point operations of one forward pass on one image."""

    parameters: int
    flops: int


def measure_uri(uri: str, role: str, image_shape: tuple[int, ...]) -> ModelSize | None:
    """Return the size of the classifier that `uri` names, with random weights if possible, or None for a black box.

    Raises BaseClassifierError if it cannot be built or does not accept images of that shape.
    """
    source = ClassifierSource.of(uri)
    if source.is_black_box:
        return None
    model, counter = load_classifier(source.without_weights() or uri, role), FlopCounterMode(display=False)
    try:
        with counter:
            model(torch.zeros(1, *image_shape, requires_grad=True))  # without gradients, fused attention is not counted
    except RuntimeError as error:
        raise BaseClassifierError(f"{role}={uri!r} does not take images of shape {image_shape}: {error}") from error
    return ModelSize(sum(parameter.numel() for parameter in model.parameters()), int(counter.get_total_flops()))


def measure_uris(std: str | None, rob: str, image_shape: tuple[int, ...]) -> dict[str, ModelSize | None]:
    """Return the sizes of `std`, `rob` and `mixed`, or of `rob` alone if `std` is None; details as in `measure_uri`."""
    sizes = {role: measure_uri(uri, role, image_shape) for role, uri in (("std", std), ("rob", rob)) if uri}
    known = [size for size in sizes.values() if size]
    if std:  # the transformation and the mixing add four numbers
        both = ModelSize(sum(size.parameters for size in known), sum(size.flops for size in known))
        sizes["mixed"] = both if len(known) == 2 else None
    return sizes
