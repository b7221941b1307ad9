"""Base classifiers by URI: frozen modules from images in [0, 1] to logits, normalisation inside.

Shapes: B images of C x H x W, K classes.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from ..errors import BaseClassifierError
from . import demo_classifiers
from .uris import check_classifier_uri, parse_uri, split_factory


def load_classifier(uri: str, role: str) -> nn.Module:
    """Build the classifier that `uri` names, in eval mode and without parameters that ask for gradients.

    Raises:
        BaseClassifierError: for an unknown form, a factory that fails, or one that returns no module.
    """
    check_classifier_uri(uri, role)
    parsed = parse_uri(uri)
    if parsed.scheme == "demo":
        factory: Callable[..., Any] = getattr(demo_classifiers, f"demo_{parsed.target}")
    else:
        factory = _factory(parsed.target, role)
    options = {key: yaml.safe_load(value) for key, value in parsed.options}
    try:
        model = factory(**options)
    except Exception as error:
        raise BaseClassifierError(f"{role}={uri!r}: the factory failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BaseClassifierError(f"{role}={uri!r}: the factory returned {type(model).__name__}, not a torch module")
    return model.eval().requires_grad_(False)


def classifier_checksum(model: nn.Module, uri: str) -> str:
    """sha256 of every parameter and buffer and, for a factory, of the source file that defines it."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    parsed = parse_uri(uri)
    if parsed.scheme == "py":
        sha.update(_source(_factory(parsed.target, "classifier")))
    return sha.hexdigest()


@torch.no_grad()
def check_classifier(model: nn.Module, images_BCHW: Tensor, role: str) -> int:
    """Try the classifier on a few images and return its number of classes.

    Raises:
        BaseClassifierError: where the output is not (B, K) with K >= 2, not finite, not repeatable, or is already
            probabilities: DLR, LayerNorm and the mixing need logits.
    """
    try:
        logits_BK = model(images_BCHW)
    except Exception as error:
        what = f"images of shape {tuple(images_BCHW.shape)}: {type(error).__name__}: {error}"
        raise BaseClassifierError(f"{role} fails on {what}") from error
    problem = _output_problem(logits_BK, model(images_BCHW), len(images_BCHW))
    if problem:
        raise BaseClassifierError(f"{role}: {problem}")
    return int(logits_BK.shape[1])


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


def _factory(target: str, role: str) -> Callable[..., Any]:
    module_name, name = split_factory(target)
    module = _module(module_name, role)
    factory = getattr(module, name, None)
    if not callable(factory):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise BaseClassifierError(f"{role}: {module_name} has no factory {name!r}; it has: {', '.join(found)}")
    return factory  # type: ignore[no-any-return]


def _module(name: str, role: str) -> ModuleType:
    try:
        return _module_from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ImportError as error:
        raise BaseClassifierError(f"{role}: cannot import {name!r}: {error}") from error


def _module_from_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once."""
    name = f"mixednuts_factory_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _source(factory: Callable[..., Any]) -> bytes:
    try:
        file = inspect.getsourcefile(factory)
    except TypeError:
        file = None
    return Path(file).read_bytes() if file else b""
