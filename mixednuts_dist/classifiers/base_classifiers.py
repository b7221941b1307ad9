"""Base classifiers by URI: frozen modules from images in [0, 1] to logits, normalisation inside.

Shapes: B images of C x H x W, K classes.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from ..errors import BaseClassifierError, MixedNutsError
from ..uris import ResourceUri, check_classifier_uri, is_black_box, parse_uri
from . import demo_classifiers
from .black_box_classifier import BlackBoxClassifier, load_black_box
from .factories import find_function, source_of
from .model_libraries import load_hub, load_timm, load_torchvision
from .normalisation import normalised_twice
from .robustbench_zoo import load_zoo_model, random_zoo_model


def load_classifier(uri: str, role: str) -> nn.Module:
    """Build the classifier that `uri` names, in eval mode and without parameters that ask for gradients.

    Raises:
        BaseClassifierError: for an unknown form, weights that are missing or of another architecture, a factory that
            fails, or one that returns no module.
    """
    check_classifier_uri(uri, role)
    try:
        model = _built(uri, parse_uri(uri), role)
    except MixedNutsError as error:
        raise BaseClassifierError(str(error) if str(error).startswith(role) else f"{role}={uri!r}: {error}") from error
    except Exception as error:
        what = "the factory failed" if uri.startswith("py:") else "cannot be built"
        raise BaseClassifierError(f"{role}={uri!r}: {what}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BaseClassifierError(f"{role}={uri!r}: the factory returned {type(model).__name__}, not a torch module")
    return model.eval().requires_grad_(False)


def classifier_checksum(model: nn.Module, uri: str) -> str:
    """sha256 of every parameter and buffer; for a function also of its source file, for a black box also of its URI."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    parsed = parse_uri(uri)
    if parsed.scheme in ("py", "callable"):
        sha.update(source_of(find_function(parsed.target, "classifier")))
    if is_black_box(uri):
        sha.update(uri.encode())
    return sha.hexdigest()


@torch.no_grad()
def check_classifier(model: nn.Module, images_BCHW: Tensor, role: str) -> int:
    """Try the classifier on a few images and return its number of classes.

    Raises:
        BaseClassifierError: where the output is not (B, K) with K >= 2, not finite, not repeatable, or is already
            probabilities (DLR, LayerNorm and the mixing need logits), or where images are normalised twice.
    """
    try:
        logits_BK = model(images_BCHW)
        if isinstance(model, BlackBoxClassifier):
            model.forget()
        again_BK = model(images_BCHW)
    except MixedNutsError:
        raise
    except Exception as error:
        what = f"images of shape {tuple(images_BCHW.shape)}: {type(error).__name__}: {error}"
        raise BaseClassifierError(f"{role} fails on {what}") from error
    problem = _output_problem(logits_BK, again_BK, len(images_BCHW)) or normalised_twice(model, images_BCHW[:2])
    if problem:
        raise BaseClassifierError(f"{role}: {problem}")
    return int(logits_BK.shape[1])


def _built(uri: str, parsed: ResourceUri, role: str) -> Any:
    options = {key: yaml.safe_load(value) for key, value in parsed.options}
    if parsed.scheme == "demo":
        return getattr(demo_classifiers, f"demo_{parsed.target}")()
    if parsed.scheme == "py":
        return find_function(parsed.target, role)(**options)
    if is_black_box(uri):
        return load_black_box(uri, parsed, options)
    random_weights = parsed.option("weights") == "none"
    libraries: dict[str, Callable[[ResourceUri], nn.Module]] = {
        "robustbench": random_zoo_model if random_weights else load_zoo_model,
        "torchvision": load_torchvision,
        "timm": load_timm,
        "hf": load_hub,
    }
    if not random_weights:
        return libraries[parsed.scheme](parsed)
    with torch.random.fork_rng(devices=[]):  # the same random weights on every machine
        torch.manual_seed(int(parsed.option("seed") or 0))
        return libraries[parsed.scheme](parsed)


def _output_problem(logits: Any, again: Any, n_images: int) -> str | None:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != n_images or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        return f"the output is {shape} for {n_images} images; it must be logits of shape (images, classes)"
    if not bool(torch.isfinite(logits).all()):
        return "the output holds NaN or infinity"
    if bool((logits >= 0).all()) and bool(((logits.sum(dim=1) - 1).abs() < 1e-4).all()):
        return "the output sums to 1 on every image: these are probabilities; return the logits before the softmax"
    if not torch.allclose(logits, again, rtol=1e-3, atol=1e-3):
        worst = float((logits - again).abs().max())
        return f"two passes over the same images differ by {worst:.3g}: the forward is random; switch the noise off"
    return None
