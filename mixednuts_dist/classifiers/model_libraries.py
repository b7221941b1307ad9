"""`torchvision:`, `timm:` and `hf:` URIs: a library's classifier with the normalisation of its weights put inside."""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BaseClassifierError
from ..uris import ResourceUri
from .checkpoints import load_weights, tensors_only
from .robustbench_package import import_quietly, quietly

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalized(nn.Module):
    """Images (B, C, H, W) in [0, 1] -> `net((images - mean) / std)`, mean and std per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """The network's logits, shape (B, K)."""
        logits_BK: Tensor = self.net((images_BCHW - self.mean) / self.std)
        return logits_BK


def load_timm(uri: ResourceUri) -> nn.Module:
    """A timm model: its default pretrained weights, `checkpoint=FILE`, or `weights=none`.

    Raises:
        BaseClassifierError: for an unknown name (close ones are listed), or weights that cannot be had.
    """
    timm = import_quietly("timm")
    architecture = uri.target.partition(".")[0]
    if not timm.is_model(architecture):
        raise _no_model("timm", uri.target, timm.list_models())
    if uri.option("weights") not in (None, "none"):
        raise BaseClassifierError(
            f"weights={uri.option('weights')!r}: timm names weights in the model's name, "
            f"timm:{architecture}.TAG; the option takes none only. A file is checkpoint=FILE"
        )
    pretrained = not (uri.option("weights") or uri.option("checkpoint"))
    with _downloads(uri):
        net = timm.create_model(uri.target, pretrained=pretrained, **_n_classes(uri))
    return _with_checkpoint(_normalized(net), uri)


def load_hub(uri: ResourceUri) -> nn.Module:
    """A model of the Hugging Face hub that timm can build, from the local cache or the network.

    Raises:
        BaseClassifierError: where the hub has no such timm model, or cannot be reached.
    """
    timm = import_quietly("timm")
    with _downloads(uri):
        net = timm.create_model(f"hf-hub:{uri.target}", pretrained=True, **_n_classes(uri))
    return _normalized(net)


def load_torchvision(uri: ResourceUri) -> nn.Module:
    """A torchvision classifier: `weights=NAME` (DEFAULT by default), `checkpoint=FILE`, or `weights=none`.

    Raises:
        BaseClassifierError: for an unknown model or weights name (the valid ones are listed), or a failed download.
    """
    models = import_quietly("torchvision.models")
    names = models.list_models(module=models)
    if uri.target not in names:
        raise _no_model("torchvision", uri.target, names)
    choices = models.get_model_weights(uri.target)
    name = "none" if uri.option("checkpoint") else (uri.option("weights") or "DEFAULT")
    if name != "none" and name not in choices.__members__:
        raise BaseClassifierError(
            f"torchvision:{uri.target} has no weights {name!r}; valid: {', '.join(choices.__members__)}, none"
        )
    weights = None if name == "none" else choices[name]
    with _downloads(uri):
        net = models.get_model(uri.target, weights=weights, **_n_classes(uri))
    recipe = weights.transforms() if weights is not None else None
    mean, std = getattr(recipe, "mean", _IMAGENET_MEAN), getattr(recipe, "std", _IMAGENET_STD)
    return _with_checkpoint(Normalized(net, mean, std), uri)


def _normalized(net: nn.Module) -> nn.Module:
    """Mean and std from the configuration that timm keeps beside the weights."""
    config: Any = net.pretrained_cfg
    return Normalized(net, config["mean"], config["std"])


def _with_checkpoint(model: Normalized | nn.Module, uri: ResourceUri) -> nn.Module:
    path = uri.option("checkpoint")
    if path is not None:
        assert isinstance(model, Normalized)
        load_weights(model.net, Path(path))
    return model


def _n_classes(uri: ResourceUri) -> dict[str, int]:
    wanted = uri.option("num_classes")
    return {} if wanted is None else {"num_classes": int(wanted)}


@contextlib.contextmanager
def _downloads(uri: ResourceUri) -> Iterator[None]:
    """A library's own download, tensors only; a failure says what to do without a network."""
    try:
        with quietly(), tensors_only():
            yield
    except (OSError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        other = "" if uri.scheme == "hf" else f", or give a local file, {uri.scheme}:{uri.target}?checkpoint=FILE"
        raise BaseClassifierError(
            f"the weights are not in the local cache and cannot be downloaded ({reason}). "
            f"Load them once on a machine with a network and copy its cache (HF_HOME, TORCH_HOME){other}"
        ) from error


def _no_model(library: str, name: str, names: Sequence[str]) -> BaseClassifierError:
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
    hint = f"close ones: {', '.join(close)}" if close else f"for instance {', '.join(list(names)[:5])}"
    return BaseClassifierError(f"{library} has no model {name!r}; {hint}")
