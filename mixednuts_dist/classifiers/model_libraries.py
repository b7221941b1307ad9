"""Build classifiers of `torchvision:`, `timm:` and `hf:` URIs, with the normalization of their weights inside."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from torch import hub, nn

from ..config.register import CLASSIFIERS
from ..config.uris import ClassifierSource, Missing
from ..errors import BaseClassifierError, reason_of
from .base_classifiers import Normalized
from .checkpoints import import_quietly, load_weights, quietly, tensors_only

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which timm asks for them


def missing_hub_files(repository: str, *needed: Sequence[str]) -> Iterator[Missing]:
    """Yield the first file of each list in `needed`, unless the local Hugging Face cache has a file of that list."""
    for names in needed:
        if not any(isinstance(try_to_load_from_cache(repository, name), str) for name in names):
            folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
            yield Missing(
                f"{names[0]} of the hub's {repository}", str(folder), f"huggingface-cli download {repository}",
                get=partial(hf_hub_download, repository, names[0]),
            )  # fmt: skip


def missing_checkpoint(url: str, what: str, folder: Path | None = None) -> Iterator[Missing]:
    """Yield the file of `url` if it is not in `folder`, by default PyTorch's cache.

    If the name ends in 8 or more hex digits after a hyphen, these are the first digits of its sha256.
    """
    name = url.rpartition("/")[2]
    path = (folder or Path(hub.get_dir(), "checkpoints")) / name
    if not path.is_file():
        digits = re.search(r"-([0-9a-f]{8,})\.", name)
        command = f"curl -L --create-dirs -o {path} {url}"
        yield Missing(f"the weights of {what}", str(path), command, url, digits[1] if digits else "")


def missing_from_timm(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `timm:` and `hf:` URIs."""
    if uri.scheme == "hf":
        yield from missing_hub_files(uri.target, ("config.json",), _HUB_FILES)
    elif not uri.option("weights") and not uri.option("checkpoint"):
        timm = import_quietly("timm")
        config = timm.models.get_pretrained_cfg(uri.target) if timm.is_model(uri.target.partition(".")[0]) else None
        if config is None or not (config.hf_hub_id or config.url):
            raise no_model("timm", uri.target, timm.list_pretrained())
        if config.hf_hub_id:
            yield from missing_hub_files(config.hf_hub_id, _HUB_FILES)
        else:
            yield from missing_checkpoint(config.url, f"timm:{uri.target}")


@CLASSIFIERS("timm", describes="a timm model", order=4, forms=("timm:NAME[?checkpoint=FILE]",), target="text",
             options={"weights": "none", "checkpoint": "file", "num_classes": "number", "seed": "number"},
             random_weights=True, missing="missing_from_timm")  # fmt: skip
@CLASSIFIERS("hf", describes="a model of the Hugging Face hub that timm can build", order=5, forms=("hf:ORG/NAME",),
             target="repository", options={"num_classes": "number"},
             missing="missing_from_timm")  # fmt: skip
def load_timm(uri: ClassifierSource) -> Normalized:
    """Build a timm model, by name or from the hub, with its pretrained weights, `checkpoint=FILE`, or `weights=none`.

    Raises BaseClassifierError for an unknown name (close ones are listed), or weights that are not available.
    """
    timm = import_quietly("timm")
    if uri.scheme != "hf" and not timm.is_model(uri.target.partition(".")[0]):
        raise no_model("timm", uri.target, timm.list_models())
    name = f"hf-hub:{uri.target}" if uri.scheme == "hf" else uri.target
    with downloads():
        is_bare = uri.option("weights") or uri.option("checkpoint")
        net = timm.create_model(name, pretrained=not is_bare, **_n_classes(uri))
    return _normalized(net, net.pretrained_cfg["mean"], net.pretrained_cfg["std"], uri)


def missing_from_torchvision(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `torchvision:` URIs."""
    if weights := _torchvision_weights(uri):
        yield from missing_checkpoint(weights.url, f"torchvision:{uri.target}")


@CLASSIFIERS("torchvision", describes="a torchvision classifier", order=3, forms=("torchvision:NAME?weights=...",),
             target="text",
             options={"weights": "text", "checkpoint": "file", "num_classes": "number", "seed": "number"},
             random_weights=True, missing="missing_from_torchvision")  # fmt: skip
def load_torchvision(uri: ClassifierSource) -> Normalized:
    """Build a torchvision classifier with `weights=NAME` (by default DEFAULT), `checkpoint=FILE`, or `weights=none`.

    Raises:
        BaseClassifierError: for an unknown model or weights name (the valid ones are listed), or a failed download.
    """
    weights = _torchvision_weights(uri)
    with downloads():
        net = import_quietly("torchvision.models").get_model(uri.target, weights=weights, **_n_classes(uri))
    recipe = weights.transforms() if weights else None
    mean, std = getattr(recipe, "mean", _IMAGENET_MEAN), getattr(recipe, "std", _IMAGENET_STD)
    return _normalized(net, mean, std, uri)


def _torchvision_weights(uri: ClassifierSource) -> Any:
    """Return the member of torchvision's enumeration of the model's weights, or None for random or local weights."""
    models, name = import_quietly("torchvision.models"), uri.option("weights") or "DEFAULT"
    names = models.list_models(module=models)
    if uri.target not in names:
        raise no_model("torchvision", uri.target, names)
    if uri.option("checkpoint") or name == "none":
        return None
    choices = models.get_model_weights(uri.target).__members__
    if name not in choices:
        raise BaseClassifierError(
            f"torchvision:{uri.target} has no weights {name!r}; valid: {', '.join(choices)}, none"
        )
    return choices[name]


def _normalized(net: nn.Module, mean: Sequence[float], std: Sequence[float], uri: ClassifierSource) -> Normalized:
    path = uri.option("checkpoint")
    return Normalized(load_weights(net, Path(path)) if path else net, mean, std)


def _n_classes(uri: ClassifierSource) -> dict[str, int]:
    return {key: int(value) for key, value in uri.options if key == "num_classes"}


@contextlib.contextmanager
def downloads() -> Iterator[None]:
    """Let a library download in the block, and load only tensors; errors explain how to work without a network."""
    try:
        with quietly(), tensors_only():
            yield
    except (OSError, RuntimeError) as error:
        raise BaseClassifierError(
            f"the weights are not in the local cache and cannot be downloaded ({reason_of(error)}). "
            "Load them once on a machine with a network and copy its cache (HF_HOME, TORCH_HOME)"
        ) from error


def no_model(library: str, name: str, names: Iterable[str]) -> BaseClassifierError:
    """Return the error for a model that a library does not have, with close names."""
    close = difflib.get_close_matches(name, list(names), n=5, cutoff=0)
    return BaseClassifierError(f"{library} has no model {name!r}; close ones: {', '.join(close) or 'none'}")
